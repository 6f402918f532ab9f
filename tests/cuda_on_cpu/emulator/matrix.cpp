// Matrix instructions of a warp: ldmatrix, stmatrix and mma.m16n8k16.
#include <algorithm>

#include "common/types.h"
#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

struct Load {
  uint32_t* registers;
  uint32_t address;
};

// Each element is read by the lane that receives it; enough, since races are told apart by warps.
void check_row(Warp& warp, size_t offset, int row, bool transposed, Site site) {
  ThreadContext* running = current;
  for (int element = 0; element < 8; element += transposed ? 1 : 2) {
    current = warp.lanes[transposed ? element * 4 + row / 2 : row * 4 + element / 2];
    check_shared(offset + 2 * element, transposed ? 2 : 4, Access::kRead, site, nullptr);
  }
  current = running;
}

void load_8x8(Warp& warp, int matrix, bool transposed, Site site) {
  const uint16_t* rows[8];
  int banks[8] = {}, worst = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t address = arguments_of<Load>(warp, matrix * 8 + i).address;
    if (address % 16)
      fail("ldmatrix%s: lane %d: the address is not a multiple of 16", site_text(site, nullptr).c_str(),
           matrix * 8 + i);
    rows[i] = static_cast<const uint16_t*>(shared_pointer(address, 16, "ldmatrix"));
    // The same row twice is one access.
    if (std::find(rows, rows + i, rows[i]) == rows + i) worst = std::max(worst, ++banks[address / 16 % 8]);
  }
  ++block.statistics.matrix_loads;
  block.statistics.conflicting_loads += worst > 1;
  for (int lane = 0; lane < 32; ++lane) {
    const int i = lane / 4, j = lane % 4 * 2;
    const uint32_t low = transposed ? rows[j][i] : rows[i][j], high = transposed ? rows[j + 1][i] : rows[i][j + 1];
    arguments_of<Load>(warp, lane).registers[matrix] = low | high << 16;
  }
  if (!block.launch->checked) return;
  for (int i = 0; i < 8; ++i)
    check_row(warp, static_cast<size_t>(reinterpret_cast<const unsigned char*>(rows[i]) - block.shared), i, transposed,
              site);
}

template <class T>
float half(uint32_t bits) {
  return to_float(T{static_cast<uint16_t>(bits)});
}

struct Fragments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

struct Matrices {
  float a[16][16], b[16][8], d[16][8];
};

#ifdef __x86_64__
__attribute__((target_clones("default", "arch=haswell")))
#endif
void multiply(Matrices& m) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) m.d[row][column] += m.a[row][k] * m.b[k][column];
}

template <class T>
void multiply_fragments(Warp& warp) {
  Matrices m;
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments& p = arguments_of<Fragments>(warp, lane);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      float* a = &m.a[g + i % 2 * 8][t + i / 2 * 8];
      a[0] = half<T>(p.a[i]), a[1] = half<T>(p.a[i] >> 16);
    }
    for (int i = 0; i < 2; ++i) m.b[t + 8 * i][g] = half<T>(p.b[i]), m.b[t + 8 * i + 1][g] = half<T>(p.b[i] >> 16);
    for (int i = 0; i < 4; ++i) m.d[g + i / 2 * 8][t + i % 2] = p.d[i];
  }
  multiply(m);
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments& p = arguments_of<Fragments>(warp, lane);
    for (int i = 0; i < 4; ++i) p.d[i] = m.d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
  ++block.statistics.products;
}

}  // namespace

void load_matrix_x4(uint32_t* registers, uint32_t address, bool transposed, Site site) {
  Load mine{registers, address};
  collective(transposed ? "transposed ldmatrix" : "ldmatrix", 0xffffffffu, site, &mine, [=](Warp& warp) {
    for (int matrix = 0; matrix < 4; ++matrix) load_8x8(warp, matrix, transposed, site);
  });
}

void store_matrix_x4(uint32_t address, const uint32_t* registers, Site site) {
  struct Store {
    uint32_t address;
    const uint32_t* registers;
  } mine{address, registers};
  collective("stmatrix", 0xffffffffu, site, &mine, [=](Warp& warp) {
    ThreadContext* running = current;
    for (int row = 0; row < 32; ++row) {
      const uint32_t to = arguments_of<Store>(warp, row).address;
      if (to % 16)
        fail("stmatrix%s: lane %d: the address is not a multiple of 16", site_text(site, nullptr).c_str(), row);
      auto* words = static_cast<uint32_t*>(shared_pointer(to, 16, "stmatrix"));
      for (int i = 0; i < 4; ++i) {
        const int lane = row % 8 * 4 + i;
        words[i] = arguments_of<Store>(warp, lane).registers[row / 8];
        current = warp.lanes[lane];
        if (block.launch->checked)
          check_shared(to - kSharedBase + 4 * static_cast<size_t>(i), 4, Access::kWrite, site, nullptr);
      }
      current = running;
    }
  });
}

void mma_16x8x16(float* d, const uint32_t* a, const uint32_t* b, bool bfloat16, Site site) {
  Fragments mine{d, a, b};
  collective("mma", 0xffffffffu, site, &mine, bfloat16 ? multiply_fragments<BFloat16> : multiply_fragments<Float16>);
}

}  // namespace gistkit::emulator
