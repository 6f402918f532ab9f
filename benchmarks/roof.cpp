// What a machine can do at most: fused multiply-adds in registers, and reading memory. Compiled once for each
// instruction set with WIDTH, the bytes of its vectors; loaded by roof.py.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

// The constraint of a vector register in inline assembly.
#if defined(__x86_64__)
#define REGISTER "v"
#else
#define REGISTER "w"
#endif

namespace {

using Clock = std::chrono::steady_clock;
typedef float Vector __attribute__((vector_size(WIDTH)));
constexpr int kLanes = WIDTH / sizeof(float);
// Latency times two issues a cycle needs 8 to 10; with the two operands 12 fit in the 16 registers of AVX2.
constexpr int kSums = 12;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs `work(thread)` on so many threads at once and returns the sum of what they return.
template <class Work>
double on_threads(int threads, Work work) {
  std::vector<double> rates(threads);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; t++) running.emplace_back([&, t] { rates[t] = work(t); });
  double sum = 0;
  for (int t = 0; t < threads; t++) {
    running[t].join();
    sum += rates[t];
  }
  return sum;
}

double multiply_add(double seconds) {
  Vector sums[kSums];
  Vector factor = Vector{} + 0.999999F;
  const Vector term = Vector{} + 1e-6F;
  // Sums that start alike would be one sum to the compiler; loops it does not unroll would keep them in memory.
#pragma GCC unroll 12
  for (int i = 0; i < kSums; i++) sums[i] = Vector{} + static_cast<float>(i);
  constexpr int kRounds = 100000;
  double flops = 0;
  double elapsed = 0;
  const auto start = Clock::now();
  do {
    for (int round = 0; round < kRounds; round++) {
#pragma GCC unroll 12
      for (int i = 0; i < kSums; i++) sums[i] = sums[i] * factor + term;
      asm volatile("" : "+" REGISTER(factor));  // a new factor each round, for all the compiler knows
    }
    flops += 2.0 * kRounds * kSums * kLanes;
    elapsed = seconds_since(start);
  } while (elapsed < seconds);
#pragma GCC unroll 12
  for (int i = 1; i < kSums; i++) sums[0] += sums[i];
  asm volatile("" ::"m"(sums[0]));
  return flops / elapsed * 1e-9;
}

}  // namespace

/// Gigaflops (float32, a multiply-add counts two) of all threads together.
extern "C" double multiply_add_gflops(int threads, double seconds) {
  return on_threads(threads, [=](int) { return multiply_add(seconds); });
}

/// Gigabytes a second of all threads together, each reading its own share of `bytes` over and over.
extern "C" double read_gbps(int threads, double bytes, double seconds) {
  constexpr std::size_t kAhead = 16;
  const std::size_t share = std::max<std::size_t>(
      1, static_cast<std::size_t>(bytes) / threads / sizeof(Vector) / kAhead);  // in groups of kAhead vectors
  return on_threads(threads, [=](int) {
    std::vector<Vector> buffer(share * kAhead);  // filled here, by the thread that reads it
    Vector sums[kAhead] = {};
    double read = 0;
    double elapsed = 0;
    const auto start = Clock::now();
    do {
      for (std::size_t i = 0; i < share; i++)
#pragma GCC unroll 16
        for (std::size_t j = 0; j < kAhead; j++) sums[j] += buffer[i * kAhead + j];
      read += static_cast<double>(share * kAhead * sizeof(Vector));
      elapsed = seconds_since(start);
    } while (elapsed < seconds);
    for (const Vector& sum : sums) asm volatile("" ::"m"(sum));
    return read / elapsed * 1e-9;
  });
}
