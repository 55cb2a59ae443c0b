// The index's lock as a long change holds it: given back every thousand blocks.
#pragma once

#include <cstddef>
#include <functional>

namespace kvindex {

class Hold {
 public:
  static constexpr size_t kBlocks = 1024;  // that others wait for at most, or as much other work
  static constexpr size_t kTokens = 256;  // hashing so many takes as long as placing a block

  virtual ~Hold() = default;

  // Say that so many blocks are done, at a moment when everything shared is whole: others may go
  // first then. They may change what other ranks hold; they see a part of this rank's change.
  void did(size_t blocks) {
    done_ += blocks;
    if (done_ < kBlocks) return;
    done_ = 0;
    pause({});
  }

  // Do work that touches nothing shared while others go first.
  void aside(const std::function<void()>& work) {
    done_ = 0;
    pause(work);
  }

 private:
  virtual void pause(const std::function<void()>& work) = 0;

  size_t done_ = 0;
};

// Keeps the lock to the end.
class WholeHold final : public Hold {
  void pause(const std::function<void()>& work) override {
    if (work) work();
  }
};

}  // namespace kvindex
