// Lanes over a libzmq that is none: what they take, what they leave, and queries meanwhile.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/intake.hpp"
#include "tests/expect.hpp"
#include "tests/made_batch.hpp"

namespace {

using namespace kvindex;
using namespace kvindex::tests;

using Frames = std::vector<std::string>;

// A socket: its messages, and a descriptor that is readable while there are any.
class FakeSocket {
 public:
  FakeSocket() : descriptor_(eventfd(0, EFD_NONBLOCK)) {}
  ~FakeSocket() { close(descriptor_); }
  FakeSocket(const FakeSocket&) = delete;
  FakeSocket& operator=(const FakeSocket&) = delete;

  int descriptor() const { return descriptor_; }
  void send(const Frames& message) {
    const std::lock_guard held(lock_);
    for (size_t i = 0; i < message.size(); ++i) frames_.push_back({message[i], i + 1 < message.size()});
    eventfd_write(descriptor_, 1);
  }
  // The next frame and whether more follow; false if there is none.
  bool receive(std::string& frame, bool& more) {
    const std::lock_guard held(lock_);
    if (frames_.empty()) {
      eventfd_t ignored;
      eventfd_read(descriptor_, &ignored);
      errno = error;
      return false;
    }
    frame = std::move(frames_.front().first);
    more = frames_.front().second;
    frames_.pop_front();
    return true;
  }
  bool readable() {
    const std::lock_guard held(lock_);
    return !frames_.empty();
  }

  std::atomic<int> error = EAGAIN;  // of a receive without a message

 private:
  std::mutex lock_;
  std::deque<std::pair<std::string, bool>> frames_;
  int descriptor_;
};

struct FakeMessage {
  std::string* frame;
  bool more;
};
std::atomic<int> open_messages{0};

FakeMessage& of(void* message) { return *static_cast<FakeMessage*>(message); }
const FakeMessage& of(const void* message) { return *static_cast<const FakeMessage*>(message); }

const ZmqCalls kFake{
    [](void* message) {
      of(message) = {new std::string(), false};
      ++open_messages;
      return 0;
    },
    [](void* message, void* socket, int) {
      return static_cast<FakeSocket*>(socket)->receive(*of(message).frame, of(message).more) ? 0 : -1;
    },
    [](void* message) {
      delete of(message).frame;
      --open_messages;
      return 0;
    },
    [](const void* message) { return of(message).more ? 1 : 0; },
    [](void* message) -> void* { return of(message).frame->data(); },
    [](const void* message) { return of(message).frame->size(); },
    [](void* socket, int, void* value, size_t*) {
      *static_cast<int*>(value) = static_cast<FakeSocket*>(socket)->readable() ? 1 : 0;
      return 0;
    },
};

constexpr uint32_t kBlockSize = 4;

std::vector<uint32_t> tokens_of(uint8_t block) { return std::vector<uint32_t>(kBlockSize, block); }

// One batch as an engine sends it: [ts, [["BlockStored", [label], nil, [tokens], 4]]].
std::string payload(uint8_t block, double ts) {
  std::string bytes("\x92\xcb");
  uint64_t bits;
  std::memcpy(&bits, &ts, sizeof bits);
  for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(bits >> shift);
  bytes += "\x91\x95\xab";
  bytes += "BlockStored\x91";
  bytes += static_cast<char>(block);
  bytes += "\xc0\x94";
  for (const uint32_t token : tokens_of(block)) bytes += static_cast<char>(token);
  bytes += static_cast<char>(kBlockSize);
  return bytes;
}

Frames message(uint64_t seq, double ts = 100.0, const std::string& topic = "kv") {
  std::string head;
  for (int shift = 56; shift >= 0; shift -= 8) head += static_cast<char>(seq >> shift);
  return {topic, head, payload(static_cast<uint8_t>(1 + seq % 100), ts)};
}

struct World {
  World() : index(made_index(1)), rank(index.add()), epoll(epoll_create1(0)), intake(epoll),
            lane(kFake, index, KeyMaker(made_secrets(2)), true) {
    for (FakeSocket* watched : {&socket, &monitor}) {
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.fd = watched->descriptor();
      EXPECT(epoll_ctl(epoll, EPOLL_CTL_ADD, watched->descriptor(), &event) == 0);
    }
    arm(0);
  }
  ~World() { close(epoll); }

  void arm(uint64_t seq) {
    lane.arm(&socket, &monitor, {rank, "kv", seq, 50.0, false});
    intake.add(lane, socket.descriptor(), monitor.descriptor());
  }
  Intake::Found look() { return intake.wait(0.0, 0.1, false); }
  bool must_look() {
    const std::vector<int> ready = look().ready;
    for (const int descriptor : ready) EXPECT(descriptor == socket.descriptor());
    return !ready.empty();
  }
  size_t taken() { return lane.collect().batches.size(); }

  Index index;
  uint32_t rank;
  int epoll;
  FakeSocket socket, monitor;
  Intake intake;
  Lane lane;
};

void takes_what_is_expected() {
  World world;
  for (uint64_t seq = 0; seq < 3; ++seq) world.socket.send(message(seq));
  const Intake::Found found = world.look();
  EXPECT(found.ready.empty() && found.more.empty());
  EXPECT(found.taken == std::vector<int>{world.socket.descriptor()});
  const Lane::Taken taken = world.lane.collect();
  EXPECT(taken.batches.size() == 3 && world.lane.next_seq() == 3);
  EXPECT(taken.batches[2].payload == message(2)[2] && taken.batches[2].ts == 100.0);
  size_t bytes = 0;
  for (const std::string& frame : message(0)) bytes += frame.size() + 2;
  EXPECT(taken.bytes == 3 * bytes);
  EXPECT(world.index.size(world.rank) == 3);
}

// Each is left, with what comes after it, and nothing more is taken until the lane is armed again.
void leaves_what_is_not_expected() {
  Frames short_message = message(1), long_message = message(1), damaged = message(1);
  short_message.pop_back();
  long_message.push_back("more");
  damaged[2].assign(1, '\xc1');
  Frames short_seq = message(1);
  short_seq[1].pop_back();
  Frames named = message(1);
  named[2][0] = '\x93';
  named[2] += '\x01';
  const std::vector<Frames> odd = {message(2), message(0), message(1, 49.0), message(1, 100.0, "k"),
                                   short_message, long_message, damaged, short_seq, named,
                                   message(~uint64_t{0})};
  for (const Frames& frames : odd) {
    World world;
    world.socket.send(message(0));
    world.socket.send(frames);
    world.socket.send(message(1));
    EXPECT(world.must_look());
    EXPECT(world.taken() == 1 && !world.lane.is_armed());
    const auto left = world.lane.collect_left();
    EXPECT(left.size() == 2 && left[0] == frames && left[1] == message(1));
    world.socket.send(message(2));
    EXPECT(world.must_look());
    EXPECT(world.taken() == 0 && world.index.size(world.rank) == 1);
    world.intake.remove(world.lane, world.socket.descriptor(), world.monitor.descriptor());
  }
}

void leaves_all_when_the_monitor_reports() {
  World world;
  world.socket.send(message(0));
  world.monitor.send({"connected"});
  EXPECT(!world.look().ready.empty());
  EXPECT(world.taken() == 0 && world.lane.collect_left().size() == 1);
  EXPECT(world.index.size(world.rank) == 0);
}

// As in a context that was terminated: Python must see the error, and close the socket.
void leaves_a_socket_that_fails() {
  World world;
  world.socket.error = ENOTSOCK;
  world.socket.send(message(0));
  EXPECT(world.must_look());
  EXPECT(!world.lane.is_armed() && world.taken() == 0 && world.lane.collect_left().size() == 1);
}

void takes_no_more_than_others_can_wait_for() {
  World world;
  for (uint64_t seq = 0; seq < 1000; ++seq) world.socket.send(message(seq));
  size_t taken = 0;
  for (int looks = 0; taken < 1000; ++looks) {
    EXPECT(looks < 1000);
    const Intake::Found found = world.look();
    const size_t now = world.taken();
    EXPECT(now > 0 && now <= 256);
    EXPECT(found.more.empty() == (taken + now == 1000));
    taken += now;
  }
}

// A lane whose messages take all the time of a round, again and again, does not keep others out.
void busy_lanes_let_others_have_their_turn() {
  World world;
  FakeSocket quiet, no_monitor;
  const uint32_t other = world.index.add();
  Lane lane(kFake, world.index, KeyMaker(made_secrets(2)), false);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = quiet.descriptor();
  EXPECT(epoll_ctl(world.epoll, EPOLL_CTL_ADD, quiet.descriptor(), &event) == 0);
  lane.arm(&quiet, &no_monitor, {other, "kv", 0, 50.0, false});
  world.intake.add(lane, quiet.descriptor(), -1);
  world.look();
  for (uint64_t seq = 0; seq < 100'000; ++seq) world.socket.send(message(seq));
  quiet.send(message(0));
  int looks = 0;
  while (world.index.size(other) == 0) {
    EXPECT(++looks <= 3);
    world.look();
  }
  world.intake.remove(lane, quiet.descriptor(), -1);
}

void leaves_what_a_removed_rank_sends() {
  World world;
  world.index.remove(world.rank);
  world.socket.send(message(0));
  EXPECT(!world.look().ready.empty());
  EXPECT(world.taken() == 0 && world.lane.collect_left().size() == 1);
}

// Its point is to run under ThreadSanitizer.
void queries_meanwhile() {
  World world;
  constexpr uint64_t kMessages = 2'000;
  std::atomic<bool> ended{false};
  std::thread sender([&] {
    for (uint64_t seq = 0; seq < kMessages; ++seq) world.socket.send(message(seq));
  });
  std::thread asker([&] {
    while (!ended) {
      const std::vector<uint32_t> prompt = tokens_of(1);
      Answer answer;
      world.index.match(made_query(prompt), answer);
    }
  });
  size_t taken = 0;
  while (taken < kMessages) {
    const Intake::Found found = world.intake.wait(1.0, 0.01, false);
    EXPECT(found.ready.empty());
    taken += world.taken();
  }
  ended = true;
  sender.join();
  asker.join();
  EXPECT(taken == kMessages && world.index.size(world.rank) == 100);
  EXPECT(world.intake.rounds() > 0 && world.intake.longest_round() > 0);
}

}  // namespace

int main() {
  takes_what_is_expected();
  leaves_what_is_not_expected();
  leaves_all_when_the_monitor_reports();
  leaves_a_socket_that_fails();
  takes_no_more_than_others_can_wait_for();
  busy_lanes_let_others_have_their_turn();
  leaves_what_a_removed_rank_sends();
  queries_meanwhile();
  EXPECT(open_messages == 0);
}
