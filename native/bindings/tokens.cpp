#include "bindings/tokens.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

namespace nb = nanobind;

namespace kvindex {

namespace {

constexpr size_t kPrefetched = 32;  // items ahead: ints of a prompt lie all over the heap

// The value of an int of one digit, or -1: those below 2**30, as tokens are.
inline int64_t small_value(PyObject* item) {
  if (!PyLong_CheckExact(item)) return -1;
#if PY_VERSION_HEX >= 0x030C0000
  const auto* number = reinterpret_cast<const PyLongObject*>(item);
  if (!PyUnstable_Long_IsCompact(number)) return -1;
  return PyUnstable_Long_CompactValue(number);
#else
  const Py_ssize_t digits = Py_SIZE(item);
  if (digits != 0 && digits != 1) return -1;
  return digits == 0 ? 0 : reinterpret_cast<const PyLongObject*>(item)->ob_digit[0];
#endif
}

// The kind of a buffer's items; false if they are no integers of 4 or 8 bytes in our byte order.
bool item_kind(const Py_buffer& buffer, TokenView::Kind& kind) {
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  const bool little = std::endian::native == std::endian::little;
  const char* native = little ? "@=<" : "@=>!";
  if (*format != '\0' && std::strchr(native, *format) != nullptr) ++format;
  if (*format == '\0' || format[1] != '\0' || std::strchr("iIlLqQnN", *format) == nullptr) {
    return false;
  }
  const bool is_signed = *format >= 'a';
  if (buffer.itemsize == 4) {
    kind = is_signed ? TokenView::Kind::i32 : TokenView::Kind::u32;
    return true;
  }
  kind = TokenView::Kind::u64;
  return buffer.itemsize == 8;
}

}  // namespace

PromptTokens::Scratch& PromptTokens::scratch() {
  thread_local Scratch scratch;
  return scratch;
}

PromptTokens::PromptTokens(nb::handle token_ids, size_t left_out) {
  if (PyList_Check(token_ids.ptr()) || PyTuple_Check(token_ids.ptr())) {
    sequence_ = token_ids.ptr();
#ifdef Py_GIL_DISABLED
    nb::ft_object_guard guard(sequence_);
#endif
    view_.length = static_cast<size_t>(Py_SIZE(sequence_));
    // Where all is left out, the first item still shows whether these are tokens.
    const bool looks = view_.length != 0 && left_out >= view_.length;
    read_ = !looks || PyLong_Check(PySequence_Fast_GET_ITEM(sequence_, 0));
  } else if (PyObject_CheckBuffer(token_ids.ptr())) {
    open_buffer(token_ids);
  }
  view_.length -= std::min(left_out, view_.length);
  view_.ready = std::min(view_.ready, view_.length);
}

PromptTokens::~PromptTokens() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

void PromptTokens::open_buffer(nb::handle token_ids) {
  // Asked for with strides, so that what is not contiguous is refused where the message is made.
  if (PyObject_GetBuffer(token_ids.ptr(), &buffer_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    buffer_.obj = nullptr;
    return;
  }
  if (buffer_.ndim != 1 || !PyBuffer_IsContiguous(&buffer_, 'C')) return;
  if (!item_kind(buffer_, view_.kind)) return;  // plain bytes too: they may be text
  view_.length = static_cast<size_t>(buffer_.len / buffer_.itemsize);
  const size_t item = view_.kind == TokenView::Kind::u64 ? 8 : 4;
  const bool aligned = reinterpret_cast<uintptr_t>(buffer_.buf) % item == 0;
  if (!aligned && view_.length != 0) return;  // kvindex.index.tokens copies it
  view_.data = buffer_.buf;
  view_.ready = view_.length;
  read_ = true;
}

bool PromptTokens::convert(size_t count) {
  if (sequence_ == nullptr || count <= view_.ready) return true;
#ifdef Py_GIL_DISABLED
  nb::ft_object_guard guard(sequence_);
#endif
  // Somebody may have changed the list since.
  view_.length = std::min(view_.length, static_cast<size_t>(Py_SIZE(sequence_)));
  count = std::min(count, view_.length);
  PyObject** items = PySequence_Fast_ITEMS(sequence_);
  if (view_.kind == TokenView::Kind::u64) return convert_wide(items, view_.ready, count);

  std::vector<uint32_t>& narrow = scratch().narrow;
  if (narrow.size() < count) narrow.resize(std::max(count, size_t{1024}));
  uint32_t* out = narrow.data();
  int64_t all = 0;
  size_t i = view_.ready;
  const size_t prefetched = count > kPrefetched ? count - kPrefetched : 0;
  for (; i < prefetched && all >= 0; ++i) {
    __builtin_prefetch(items[i + kPrefetched]);
    const int64_t value = small_value(items[i]);
    all |= value;
    out[i] = static_cast<uint32_t>(value);
  }
  for (; i < count && all >= 0; ++i) {
    const int64_t value = small_value(items[i]);
    all |= value;
    out[i] = static_cast<uint32_t>(value);
  }
  if (all < 0) return convert_wide(items, view_.ready, count);
  view_.data = out;
  view_.ready = std::max(view_.ready, count);
  return true;
}

// Convert with all care; what was converted already is made wide too.
bool PromptTokens::convert_wide(PyObject** items, size_t from, size_t to) {
  std::vector<uint64_t>& wide = scratch().wide;
  wide.resize(std::max(wide.size(), to));
  if (view_.kind != TokenView::Kind::u64) {
    const auto* narrow = static_cast<const uint32_t*>(view_.data);
    std::copy(narrow, narrow + from, wide.begin());
    view_.kind = TokenView::Kind::u64;
  }
  for (size_t i = from; i < to; ++i) {
    if (!PyLong_Check(items[i])) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(items[i], &overflow);
    wide[i] = static_cast<uint64_t>(value);
    if (overflow > 0) wide[i] = PyLong_AsUnsignedLongLong(items[i]);
    if (overflow < 0 || PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
  }
  view_.data = wide.data();
  view_.ready = to;
  return true;
}

}  // namespace kvindex
