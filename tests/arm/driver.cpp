// Runs one op of csrc/cpu on a case from a file: DRIVER LEVEL CASE RESULT, with the instruction set of that level.
//
// A case has the op's name, its params struct as bytes, arrays, and which pointers of the struct lead into which array.
// The result has the arrays that are outputs, one after the other. Numbers are of 8 bytes; a length precedes what
// varies.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/pool/pool.h"
#include "cpu/rope/rope.h"
#include "cpu/trie/trie.h"

namespace {

using Op = void (*)(const void* params, const gistkit::Parallel&);

template <class Params, void (*kOp)(const Params&, const gistkit::Parallel&)>
void call(const void* params, const gistkit::Parallel& pool) {
  kOp(*static_cast<const Params*>(params), pool);
}

const std::map<std::string, Op> kOps = {
    {"rope", call<gistkit::RopeParams, gistkit::rope>},
    {"rope_angle_grad", call<gistkit::RopeAngleGradParams, gistkit::rope_angle_grad>},
    {"window_pool", call<gistkit::PoolParams, gistkit::window_pool>},
    {"attention_forward", call<gistkit::AttentionForward, gistkit::attention_forward>},
    {"attention_backward", call<gistkit::AttentionBackward, gistkit::attention_backward>},
    {"trie_mix", call<gistkit::TrieMixParams, gistkit::trie_mix>},
    {"trie_mix_backward", call<gistkit::TrieMixGradParams, gistkit::trie_mix_backward>},
    {"ancestor_attention", call<gistkit::AncestorAttentionParams, gistkit::ancestor_attention>},
    {"ancestor_attention_backward", call<gistkit::AncestorAttentionGradParams, gistkit::ancestor_attention_backward>},
    {"bias_gelu", call<gistkit::BiasGeluParams, gistkit::bias_gelu>},
    {"bias_gelu_backward", call<gistkit::BiasGeluGradParams, gistkit::bias_gelu_backward>},
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

struct Reader {
  std::ifstream file;

  void read(void* to, int64_t bytes) {
    if (!file.read(static_cast<char*>(to), bytes)) fail("the case ends early");
  }
  int64_t number() {
    int64_t value;
    read(&value, sizeof value);
    return value;
  }
  std::vector<char> bytes() {
    std::vector<char> data(static_cast<size_t>(number()));
    read(data.data(), static_cast<int64_t>(data.size()));
    return data;
  }
};

// Begins where it did on the host, modulo kLine.
struct Array {
  static constexpr int64_t kLine = 64;
  bool is_output;
  int64_t bytes;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
  char* begin;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) fail("usage: DRIVER LEVEL CASE RESULT");
  if (gistkit_cpu_isa(std::atoi(arguments[1])) != std::atoi(arguments[1])) fail("no such instruction set");
  Reader in{std::ifstream(arguments[2], std::ios::binary)};
  const std::vector<char> name = in.bytes();
  std::vector<char> params = in.bytes();
  std::vector<Array> arrays(static_cast<size_t>(in.number()));
  for (Array& array : arrays) {
    array.is_output = in.number();
    const int64_t offset = in.number();
    array.bytes = in.number();
    const int64_t room = (offset + array.bytes + Array::kLine) / Array::kLine * Array::kLine;
    array.memory.reset(static_cast<char*>(std::aligned_alloc(Array::kLine, static_cast<size_t>(room))));
    array.begin = array.memory.get() + offset;
    in.read(array.begin, array.bytes);
  }
  for (int64_t pointers = in.number(); pointers > 0; --pointers) {
    const int64_t place = in.number(), array = in.number();
    char* const address = arrays[static_cast<size_t>(array)].begin + in.number();
    std::memcpy(params.data() + place, &address, sizeof address);
  }
  const auto op = kOps.find(std::string(name.begin(), name.end()));
  if (op == kOps.end()) fail("no such op");
  op->second(params.data(), {1, nullptr});
  std::ofstream out(arguments[3], std::ios::binary);
  for (const Array& array : arrays)
    if (array.is_output) out.write(array.begin, array.bytes);
  return out.flush() ? 0 : 1;
}
