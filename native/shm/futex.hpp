// Sleeping until a word in shared memory changes: Linux's futex, between processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#else
#include <algorithm>
#include <thread>
#endif

namespace kvindex::shm {

// Sleep while `word` is `value`, for `most` at the longest. Returns early at any time.
inline void futex_wait(uint32_t* word, uint32_t value, std::chrono::nanoseconds most) {
#if defined(__linux__)
  timespec time{};
  time.tv_sec = static_cast<time_t>(most.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(most.count() % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT, value, &time, nullptr, 0);
#else  // kvindex.shm refuses to work there; the tests' threads still may
  (void)word, (void)value;
  std::this_thread::sleep_for(std::min(most, std::chrono::nanoseconds(100'000)));
#endif
}

// Wake everyone who sleeps on `word`.
inline void futex_wake(uint32_t* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace kvindex::shm
