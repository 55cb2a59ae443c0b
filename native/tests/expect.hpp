// What the native tests share: a check that ends the program, and a seeded source of choices.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

// Ends the program with the line that failed; works in every build, unlike assert.
#define EXPECT(truth)                                                            \
  do {                                                                           \
    if (!(truth)) {                                                              \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #truth);   \
      std::abort();                                                              \
    }                                                                            \
  } while (false)

namespace kvindex::tests {

class Choices {
 public:
  explicit Choices(uint64_t seed) : engine_(seed) {}

  uint64_t word() { return engine_(); }
  // From 0 to `bound` - 1.
  uint32_t below(uint64_t bound) { return static_cast<uint32_t>(engine_() % bound); }
  // True once in `times`.
  bool once_in(uint64_t times) { return below(times) == 0; }

 private:
  std::mt19937_64 engine_;
};

// How many rounds a test runs: KVINDEX_TEST_ROUNDS times as many as usual.
inline int rounds(int usual) {
  const char* const factor = std::getenv("KVINDEX_TEST_ROUNDS");
  return factor == nullptr ? usual : usual * std::atoi(factor);
}

}  // namespace kvindex::tests
