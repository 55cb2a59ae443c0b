#include "core/lane.hpp"

#include <cerrno>
#include <utility>

#include "core/big_endian.hpp"
#include "core/decode.hpp"

namespace kvindex {

namespace {

// Of zmq.h, whose numbers never change.
constexpr int kDontWait = 1;
constexpr int kEvents = 15;
constexpr int kPollIn = 1;

constexpr size_t kMostMessages = 256;  // of one stream before others get their turn
constexpr size_t kMostBytes = size_t{8} << 20;
constexpr size_t kChunk = 16;  // messages received, then applied while the caches have them
constexpr size_t kChunkBytes = size_t{32} << 10;  // likewise: a long message is a chunk by itself
constexpr size_t kMostBlocks = size_t{1} << 17;  // as kvindex.wire.decode.MAX_BLOCKS
constexpr size_t kMostKept = size_t{4} << 20;  // bytes of the decoded batch between messages

}  // namespace

ZmqMessage::Received ZmqMessage::receive(void* socket) {
  clear();
  do {
    Frame& frame = frames_.emplace_back();
    zmq_->msg_init(&frame);
    if (zmq_->msg_recv(&frame, socket, kDontWait) < 0) {
      const int error = errno;
      zmq_->msg_close(&frame);
      frames_.pop_back();
      // A message that breaks off has too few frames, which is noticed.
      if (!frames_.empty()) break;
      return error == EAGAIN || error == EINTR ? Received::nothing : Received::failure;
    }
  } while (zmq_->msg_more(&frames_.back()) != 0);
  return Received::message;
}

void ZmqMessage::clear() {
  for (Frame& frame : frames_) zmq_->msg_close(&frame);
  frames_.clear();
}

std::string_view ZmqMessage::frame(size_t i) {
  return {static_cast<const char*>(zmq_->msg_data(&frames_[i])), zmq_->msg_size(&frames_[i])};
}

size_t ZmqMessage::bytes() const {
  size_t all = 0;
  for (const Frame& frame : frames_) {
    const size_t size = zmq_->msg_size(&frame);
    all += size + (size > 255 ? 9 : 2);
  }
  return all;
}

void Lane::arm(void* socket, void* monitor, Expected expected) {
  socket_ = socket;
  monitor_ = monitor;
  expected_ = std::move(expected);
  is_armed_ = true;
}

Lane::Outcome Lane::take(Clock::time_point until) {
  std::deque<ZmqMessage> chunk;
  for (size_t messages = 0, bytes = 0; messages < kMostMessages && bytes < kMostBytes;) {
    size_t count = 0;
    bool is_drained = false;
    bool is_odd = false;
    for (const size_t end = bytes + kChunkBytes; count < kChunk && bytes < end; ++count) {
      if (count == chunk.size()) chunk.emplace_back(*zmq_);
      const auto received = chunk[count].receive(socket_);
      if (received != ZmqMessage::Received::message) {
        is_drained = true;
        is_odd = received == ZmqMessage::Received::failure;  // as when the context is terminated
        break;
      }
      bytes += chunk[count].bytes();
      taken_.bytes += chunk[count].bytes();
    }
    // Messages first, then the monitor: so no message of a new connection is taken for one of the
    // connection before.
    is_odd = is_odd || monitor_reports();
    for (size_t i = 0; i < count; ++i) {
      is_odd = is_odd || !apply(chunk[i]);
      if (is_odd) leave(chunk[i]);
    }
    if (is_odd) {
      disarm();
      return Outcome::odd;
    }
    if (is_drained) return Outcome::drained;
    messages += count;
    if (Clock::now() >= until) break;
  }
  return Outcome::more;
}

bool Lane::monitor_reports() const {
  if (monitor_ == nullptr) return false;
  int events = 0;
  size_t size = sizeof events;
  return zmq_->getsockopt(monitor_, kEvents, &events, &size) != 0 || (events & kPollIn) != 0;
}

bool Lane::apply(ZmqMessage& message) {
  if (message.frames() != 3) return false;
  const std::string_view head = message.frame(1);
  if (!message.frame(0).starts_with(expected_.topic) || head.size() != sizeof(uint64_t)) return false;
  const auto seq = load_big_endian<uint64_t>(reinterpret_cast<const uint8_t*>(head.data()));
  if (seq != expected_.seq || seq == ~uint64_t{0}) return false;
  const std::string_view payload = message.frame(2);
  thread_local Batch batch;
  try {
    const auto* data = reinterpret_cast<const uint8_t*>(payload.data());
    if (decode(data, payload.size(), batch) != Verdict::decoded) return false;
    if (batch.ts < expected_.oldest_ts || batch.hashes.size() > kMostBlocks) return false;
    if (batch.dp_rank >= 0 && !expected_.is_named) return false;
    taken_.batches.push_back({batch.ts, static_cast<int64_t>(fingerprints_.fingerprint(payload)),
                              std::string(keeps_payloads_ ? payload : std::string_view())});
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!apply_decoded(batch)) {
    taken_.batches.pop_back();
    return false;
  }
  if (batch.capacity() > kMostKept) batch = Batch();
  ++expected_.seq;
  return true;
}

bool Lane::apply_decoded(const Batch& batch) {
  try {
    return index_->apply(expected_.rank, batch);
  } catch (const std::bad_alloc&) {
    return false;  // the index reports it to Python, which applies the batch next
  }
}

void Lane::leave(ZmqMessage& message) {
  std::vector<std::string>& frames = left_.emplace_back();
  for (size_t i = 0; i < message.frames(); ++i) frames.emplace_back(message.frame(i));
}

Lane::Taken Lane::collect() { return std::exchange(taken_, {}); }

std::vector<std::vector<std::string>> Lane::collect_left() { return std::exchange(left_, {}); }

}  // namespace kvindex
