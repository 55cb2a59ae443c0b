// Work without the GIL, by threads that the interpreter may not wait for.
#pragma once

#include <Python.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>

namespace kvindex {

// Bytes of a payload from which on it is worth a hand-over of the GIL.
inline constexpr size_t kLongPayload = 1024;

// The GIL is let go for the scope's length.
//
// A daemon thread that comes back when the interpreter is ending gets no GIL: Python up to 3.13 ends
// it by pthread_exit, which unwinds the stack as an exception does. From a destructor, and through
// C++ frames that catch everything, that would end the process by std::terminate. Such a thread
// waits here instead until the process is gone, as Python does it itself from 3.14 on.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// The GIL is kept for the scope's length, unless the index has to be waited for: then it is let go,
// and is had again when the scope ends, by when the index is given back. Nothing of Python is to be
// touched within the scope.
class GilUntilWaiting {
 public:
  GilUntilWaiting() { current_ = this; }
  ~GilUntilWaiting() { current_ = nullptr; }
  GilUntilWaiting(const GilUntilWaiting&) = delete;
  GilUntilWaiting& operator=(const GilUntilWaiting&) = delete;

  // Called by a thread that is about to wait, in such a scope or without the GIL.
  static void waiting() {
    if (current_ != nullptr && !current_->released_) current_->released_.emplace();
  }

 private:
  static inline thread_local GilUntilWaiting* current_ = nullptr;
  std::optional<GilReleased> released_;
};

}  // namespace kvindex
