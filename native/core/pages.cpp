#include "core/pages.hpp"

#include <cstdlib>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define KVINDEX_HAS_MMAP 1
#endif

namespace kvindex {

namespace {

constexpr size_t kLine = 64;  // of the cache: where every stretch begins
constexpr size_t kPage = 4096;
[[maybe_unused]] constexpr size_t kMapped = size_t{1} << 20;  // from here on, pages of its own

}  // namespace

Pages::Pages(size_t bytes) : bytes_((bytes + kLine - 1) / kLine * kLine) {
#ifdef KVINDEX_HAS_MMAP
  if (bytes_ >= kMapped) {  // as the destructor asks
    bytes_ = (bytes_ + kPage - 1) / kPage * kPage;
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(mapped);
    return;
  }
#endif
  // Aligned by hand: glibc's aligned_alloc leaves holes that it does not use again.
  taken_ = std::malloc(bytes_ + kLine);
  if (taken_ == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(taken_);
  data_ = static_cast<uint8_t*>(taken_) + (kLine - address % kLine);
}

Pages::~Pages() {
  if (data_ == nullptr) return;
#ifdef KVINDEX_HAS_MMAP
  if (bytes_ >= kMapped) {
    munmap(data_, bytes_);
    return;
  }
#endif
  std::free(taken_);
}

}  // namespace kvindex
