// Token ids of Python's to tokens in memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/prompt.hpp"

namespace kvindex {

// A prompt as a caller gave it: a list or tuple of ints, which is converted when asked, or a buffer,
// which is read where it is. Belongs to one call; every method needs the GIL.
class PromptTokens {
 public:
  // The last `left_out` tokens do not take part. `read()` says whether the others can be read here;
  // kvindex.index.tokens reads, or refuses, everything else.
  explicit PromptTokens(nanobind::handle token_ids, size_t left_out = 0);
  ~PromptTokens();
  PromptTokens(const PromptTokens&) = delete;
  PromptTokens& operator=(const PromptTokens&) = delete;

  bool read() const { return read_; }

  // Make so many tokens ready, as far as there are so many; false if one of them is no int of 64
  // bits.
  bool convert(size_t count);

  const TokenView& view() const { return view_; }

 private:
  void open_buffer(nanobind::handle token_ids);
  bool convert_wide(PyObject** items, size_t from, size_t to);

  // Memory that a thread keeps from prompt to prompt.
  struct Scratch {
    std::vector<uint32_t> narrow;
    std::vector<uint64_t> wide;
  };
  static Scratch& scratch();

  TokenView view_;
  PyObject* sequence_ = nullptr;  // a list or tuple; borrowed from the caller
  Py_buffer buffer_{};
  bool read_ = false;
};

}  // namespace kvindex
