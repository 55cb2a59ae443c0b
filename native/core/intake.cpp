#include "core/intake.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <utility>

namespace kvindex {

namespace {

constexpr int kMostEvents = 256;
constexpr auto kRound = std::chrono::milliseconds(10);  // after which the rest waits for the next

std::chrono::steady_clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

// As epoll counts: rounded up, so that nobody wakes too early, again and again.
int milliseconds(std::chrono::steady_clock::duration left) {
  const double exact = std::chrono::duration<double, std::milli>(left).count();
  return exact <= 0 ? 0 : static_cast<int>(std::ceil(exact));
}

}  // namespace

void Intake::add(Lane& lane, int socket, int monitor) {
  watched_[socket] = {&lane, socket, false};
  if (monitor >= 0) watched_[monitor] = {&lane, socket, true};
  // Descriptors report changes only, and something may be there already.
  if (!is_pending(&lane)) pending_.emplace_back(&lane, socket);
}

void Intake::remove(Lane& lane, int socket, int monitor) {
  for (const int descriptor : {socket, monitor}) {
    const auto at = watched_.find(descriptor);
    if (at != watched_.end() && at->second.lane == &lane) watched_.erase(at);
  }
  std::erase_if(pending_, [&](const auto& entry) { return entry.first == &lane; });
}

bool Intake::is_pending(const Lane* lane) const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const auto& entry) { return entry.first == lane; });
}

void Intake::take(Lane& lane, int socket, Clock::time_point until, Found& found) {
  const bool had_taken = lane.has_taken();
  const Lane::Outcome outcome = lane.take(until);
  if (!had_taken && lane.has_taken()) found.taken.push_back(socket);
  if (outcome == Lane::Outcome::odd) found.ready.push_back(socket);
  if (outcome == Lane::Outcome::more) {
    found.more.push_back(socket);
    pending_.emplace_back(&lane, socket);
  }
}

Intake::Found Intake::wait(double seconds, double show_after, bool shows_at_once) {
  Found found;
  auto deadline = Clock::now() + as_duration(seconds);
  std::array<epoll_event, kMostEvents> events;
  for (;;) {
    const int timeout = pending_.empty() ? milliseconds(deadline - Clock::now()) : 0;
    const int count = epoll_wait(epoll_, events.data(), kMostEvents, timeout);
    const auto started = Clock::now();
    const auto until = started + kRound;
    const bool had_taken = !found.taken.empty();
    for (const auto& [lane, socket] : std::exchange(pending_, {})) {
      if (lane->is_armed()) take(*lane, socket, until, found);
    }
    for (int i = 0; i < count; ++i) {
      const int descriptor = events[static_cast<size_t>(i)].data.fd;
      const auto at = watched_.find(descriptor);
      if (at == watched_.end() || !at->second.lane->is_armed()) {
        found.ready.push_back(descriptor);
      } else if (const auto& [lane, socket, is_monitor] = at->second; is_monitor) {
        if (lane->monitor_reports()) {
          lane->disarm();
          found.ready.push_back(socket);
        }
      } else if (is_pending(lane)) {
        continue;  // it was taken from just now
      } else if (Clock::now() < until) {
        take(*lane, socket, until, found);
      } else {
        pending_.emplace_back(lane, socket);  // its turn comes before that of others
      }
    }
    const auto ended = Clock::now();
    ++rounds_;
    longest_round_ = std::max(longest_round_, ended - started);
    if (!had_taken && !found.taken.empty()) {
      deadline = std::min(deadline, started + as_duration(shows_at_once ? 0.0 : show_after));
    }
    if (!found.ready.empty() || !found.more.empty() || ended >= deadline) return found;
  }
}

double Intake::longest_round() {
  return std::chrono::duration<double>(std::exchange(longest_round_, {})).count();
}

}  // namespace kvindex
