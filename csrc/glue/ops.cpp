#include "glue/ops.h"

namespace gistkit::ops {

void define_ops(Library& m) {
  define_attention(m);
  define_rope(m);
  define_pool(m);
  define_trie(m);
}

void implement_ops(Library& m) {
  implement_attention(m);
  implement_rope(m);
  implement_pool(m);
  implement_trie(m);
}

}  // namespace gistkit::ops
