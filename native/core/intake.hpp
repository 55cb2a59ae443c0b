// Waits for the sockets of all streams, and has armed lanes take what comes. Linux only.
//
// It waits at the epoll descriptor with which Python's selector registers the sockets. What belongs
// to no armed lane is returned to Python; so long as nothing does, it goes on by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/lane.hpp"

namespace kvindex {

class Intake {
 public:
  // What a wait has found, as descriptors of sockets. The bounds of one wait keep it short.
  struct Found {
    std::vector<int> ready;  // Python must look
    std::vector<int> more;   // their lanes have taken up to a bound, and go on in the next wait
    std::vector<int> taken;  // their lanes have taken something
  };

  explicit Intake(int epoll) : epoll_(epoll) {}

  // Have a lane, while it is armed, take what comes at its socket. Descriptors; no monitor is -1.
  void add(Lane& lane, int socket, int monitor);
  // Forget it and its descriptors. Idempotent.
  void remove(Lane& lane, int socket, int monitor);

  // Wait for at most so long for something that Python must do. Batches that were taken are shown
  // by Python: so it returns at the latest `show_after` seconds after the first one, or, if
  // `shows_at_once`, after the round that brought it.
  Found wait(double seconds, double show_after, bool shows_at_once);

  uint64_t rounds() const { return rounds_; }
  // The longest time that passed between two waits for sockets, in seconds, since it was asked last.
  double longest_round();

 private:
  struct Watched {
    Lane* lane;
    int socket;
    bool is_monitor;
  };
  using Clock = Lane::Clock;

  void take(Lane& lane, int socket, Clock::time_point until, Found& found);
  bool is_pending(const Lane* lane) const;

  int epoll_;
  std::unordered_map<int, Watched> watched_;  // by descriptor
  std::vector<std::pair<Lane*, int>> pending_;  // lanes to take from next, and their sockets
  uint64_t rounds_ = 0;
  Clock::duration longest_round_{};
};

}  // namespace kvindex
