// The ops of a library. Each op's file defines its schemas and its implementation, which runs on the library's device;
// a new op is declared here and called in ops.cpp.
#pragma once
#include <torch/csrc/stable/library.h>

namespace gistkit::ops {

using Library = torch::stable::detail::StableLibrary;

void define_attention(Library& m);
void define_rope(Library& m);
void define_pool(Library& m);
void define_trie(Library& m);

void implement_attention(Library& m);
void implement_rope(Library& m);
void implement_pool(Library& m);
void implement_trie(Library& m);

// All of them: schemas once in a process, and an implementation for each device.
void define_ops(Library& m);
void implement_ops(Library& m);

// Of a GPU only.
void implement_attention_tiles(Library& m);

}  // namespace gistkit::ops
