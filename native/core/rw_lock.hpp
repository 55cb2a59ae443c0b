// A lock for many readers or one writer, in which neither keeps the other out.
//
// A writer that waits closes a turnstile that every later reader has to pass: readers that overlap
// without end would else keep it out where the platform prefers readers, as musl always does. The
// turnstile is open again once the writer has the lock, so readers that came meanwhile go before the
// next writer. While no writer waits, a reader pays one load for it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace kvindex {

class RwLock {
 public:
  RwLock() = default;
  ~RwLock() { pthread_rwlock_destroy(&lock_); }
  RwLock(const RwLock&) = delete;
  RwLock& operator=(const RwLock&) = delete;

  // As the standard's shared_mutex, for its guards.
  void lock() {
    if (try_lock()) return;
    ++waiting_;
    {
      const std::lock_guard closed(turnstile_);
      pthread_rwlock_wrlock(&lock_);
    }
    --waiting_;
  }
  bool try_lock() { return pthread_rwlock_trywrlock(&lock_) == 0; }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() {
    if (writer_waits()) {
      const std::lock_guard passed(turnstile_);
    }
    pthread_rwlock_rdlock(&lock_);
  }
  bool try_lock_shared() { return !writer_waits() && pthread_rwlock_tryrdlock(&lock_) == 0; }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

  // Whether some writer has to wait for others.
  bool writer_waits() const { return waiting_.load(std::memory_order_relaxed) != 0; }

 private:
  pthread_rwlock_t lock_ = PTHREAD_RWLOCK_INITIALIZER;
  std::mutex turnstile_;
  std::atomic<unsigned> waiting_{0};
};

}  // namespace kvindex
