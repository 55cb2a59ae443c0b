// Work without the GIL, by threads that the interpreter may not wait for.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace kvindex {

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

}  // namespace kvindex
