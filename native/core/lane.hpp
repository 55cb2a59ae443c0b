// The short way of ordinary messages: from a ZeroMQ socket into the index.
//
// A lane belongs to one stream. While it is armed it takes the batches that the stream's sequencer
// named, and knows no rule of its own: a message that is not exactly the next one is left to Python,
// with all that was received after it, and the lane takes nothing more until it is armed again.
//
// Owned by the thread that receives; it needs no GIL.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.hpp"
#include "core/index.hpp"
#include "core/prefix_key.hpp"

namespace kvindex {

// What libzmq exports. kvindex/subscribe/watch.py finds pyzmq's own; nothing is linked with it.
struct ZmqCalls {
  int (*msg_init)(void* message);
  int (*msg_recv)(void* message, void* socket, int flags);
  int (*msg_close)(void* message);
  int (*msg_more)(const void* message);
  void* (*msg_data)(void* message);
  size_t (*msg_size)(const void* message);
  int (*getsockopt)(void* socket, int option, void* value, size_t* size);
};

// One received message: its frames, which are closed when it goes.
class ZmqMessage {
 public:
  explicit ZmqMessage(const ZmqCalls& zmq) : zmq_(&zmq) {}
  ~ZmqMessage() { clear(); }
  ZmqMessage(const ZmqMessage&) = delete;
  ZmqMessage& operator=(const ZmqMessage&) = delete;

  enum class Received { message, nothing, failure };
  // Receive the next message without waiting.
  Received receive(void* socket);
  void clear();

  size_t frames() const { return frames_.size(); }
  std::string_view frame(size_t i);
  // Bytes on the wire, with the head of each frame.
  size_t bytes() const;

 private:
  struct alignas(8) Frame {  // zmq_msg_t
    unsigned char bytes[64];
  };
  const ZmqCalls* zmq_;
  std::deque<Frame> frames_;  // libzmq's messages must not move
};

class Lane {
 public:
  using Clock = std::chrono::steady_clock;

  // What must come next.
  struct Expected {
    uint32_t rank = 0;       // of the index
    std::string topic;       // a message's topic begins with it
    uint64_t seq = 0;
    double oldest_ts = 0.0;  // an older batch belongs to an earlier epoch
    bool is_named = false;   // whether batches have named their dp_rank before
  };
  struct TakenBatch {
    double ts = 0.0;
    int64_t fingerprint = 0;
    std::string payload;  // empty unless payloads are kept
  };
  // What was taken since the last `collect`.
  struct Taken {
    std::vector<TakenBatch> batches;  // numbered without a hole
    size_t bytes = 0;  // received, also of messages that were left
  };
  enum class Outcome : uint8_t {
    drained,  // the socket is empty
    more,     // it may have more
    odd,      // Python must look: at the messages left, or at what the monitor reports
  };

  Lane(const ZmqCalls& zmq, Index& index, const KeyMaker& fingerprints, bool keeps_payloads)
      : zmq_(&zmq), index_(&index), fingerprints_(fingerprints), keeps_payloads_(keeps_payloads) {}

  // Sockets of libzmq; `monitor` is null where there is none.
  void arm(void* socket, void* monitor, Expected expected);
  void disarm() { is_armed_ = false; }
  bool is_armed() const { return is_armed_; }

  // Take what is there, up to a bound; for an armed lane only. No allocation is of a size that a
  // peer chooses but its own message's.
  Outcome take(Clock::time_point until);
  // Whether the monitor has something to report.
  bool monitor_reports() const;

  // The number of the batch that must come next.
  uint64_t next_seq() const { return expected_.seq; }
  bool keeps_payloads() const { return keeps_payloads_; }
  bool has_taken() const { return taken_.bytes != 0; }
  Taken collect();
  // The messages that were received and not taken, in order, as their frames.
  std::vector<std::vector<std::string>> collect_left();

 private:
  bool apply(ZmqMessage& message);
  bool apply_decoded(const Batch& batch);
  void leave(ZmqMessage& message);

  const ZmqCalls* zmq_;
  Index* index_;
  KeyMaker fingerprints_;
  bool keeps_payloads_;
  bool is_armed_ = false;
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  Expected expected_;
  Taken taken_;
  std::vector<std::vector<std::string>> left_;
};

}  // namespace kvindex
