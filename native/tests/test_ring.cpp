// The ring under threads: every reader gets every message whole and in order, and no wake-up is
// lost. Its point is to run under ThreadSanitizer; the messages are checked all the same.
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "shm/ring.hpp"
#include "tests/expect.hpp"

namespace {

using namespace kvindex::shm;
using namespace kvindex::tests;
using namespace std::chrono_literals;

constexpr uint32_t kKind = 3;

// Memory of a ring, as a new file's: zeros.
class Memory {
 public:
  explicit Memory(const Layout& layout) : lines_(layout.total_bytes() / Layout::kLine + 1) {}
  uint8_t* data() { return lines_[0].data(); }

 private:
  struct alignas(Layout::kLine) Line : std::array<uint8_t, Layout::kLine> {};
  std::vector<Line> lines_;
};

uint64_t length_of(uint64_t message) { return 8 + message % 50; }

void write(Writer& writer, uint64_t message, Nanoseconds spin) {
  while (!writer.wait(spin, 1s)) {
  }
  uint8_t* const chunk = writer.chunk();
  std::memcpy(chunk, &message, sizeof message);
  std::memset(chunk + 8, static_cast<int>(message % 251), length_of(message) - 8);
  writer.publish(kKind, length_of(message));
}

uint64_t read(Reader& reader, Nanoseconds spin) {
  while (!reader.wait(spin, 1s)) {
  }
  EXPECT(reader.sound());
  EXPECT(reader.kind() == kKind);
  uint64_t message;
  std::memcpy(&message, reader.chunk(), sizeof message);
  EXPECT(reader.length() == length_of(message));
  for (uint64_t i = 8; i < reader.length(); ++i) EXPECT(reader.chunk()[i] == message % 251);
  reader.release();
  return message;
}

void reserve(Memory& memory, const Layout& layout) {
  const Ring ring(memory.data(), layout);
  for (uint32_t reader = 0; reader < layout.n_reader; ++reader) {
    ring.slot_state(reader).store(static_cast<uint32_t>(SlotState::kReserved));
  }
}

void all_get_all(uint32_t readers, uint32_t chunks, Nanoseconds spin, uint64_t messages) {
  const Layout layout{readers, chunks, 64};
  Memory memory(layout);
  reserve(memory, layout);
  std::vector<std::thread> threads;
  for (uint32_t slot = 0; slot < readers; ++slot) {
    threads.emplace_back([&, slot] {
      Reader reader(memory.data(), layout, slot);
      EXPECT(reader.attach());
      for (uint64_t message = 0; message < messages; ++message) {
        EXPECT(read(reader, spin) == message);
      }
    });
  }
  Writer writer(memory.data(), layout);
  while (!writer.wait_attached(1s)) {
  }
  for (uint64_t message = 0; message < messages; ++message) write(writer, message, spin);
  for (std::thread& thread : threads) thread.join();
  EXPECT(writer.awaited().empty());
}

// A reader that comes and goes gets a run without a hole each time it is there.
void come_and_go(uint64_t messages) {
  const Layout layout{2, 3, 64};
  Memory memory(layout);
  reserve(memory, layout);
  std::atomic<bool> ended{false};
  std::thread steady([&] {
    Reader reader(memory.data(), layout, 0);
    reader.attach();
    for (uint64_t message = 0; message < messages; ++message) EXPECT(read(reader, 0ns) == message);
  });
  std::thread guest([&] {
    uint64_t stays = 0;
    while (!ended.load()) {
      Reader reader(memory.data(), layout, 1);
      reader.attach();
      uint64_t next = 0;
      for (int i = 0; i < 20 && !ended.load(); ++i) {
        if (!reader.wait(0ns, 1ms)) continue;
        const uint64_t message = read(reader, 0ns);
        EXPECT(next == 0 || message == next);
        EXPECT(reader.seq() == message + 1);
        next = message + 1;
      }
      reader.leave();
      ++stays;
    }
    EXPECT(stays > 1);
  });
  Writer writer(memory.data(), layout);
  for (uint64_t message = 0; message < messages; ++message) {
    writer.admit();
    write(writer, message, 0ns);
  }
  steady.join();
  ended.store(true);
  guest.join();
}

// What a party counts may be read by any thread.
void counts_are_watched(uint64_t messages) {
  const Layout layout{1, 2, 64};
  Memory memory(layout);
  reserve(memory, layout);
  Writer writer(memory.data(), layout);
  Reader reader(memory.data(), layout, 0);
  reader.attach();
  std::thread reading([&] {
    for (uint64_t message = 0; message < messages; ++message) read(reader, 20us);
  });
  std::thread writing([&] {
    for (uint64_t message = 0; message < messages; ++message) write(writer, message, 20us);
  });
  uint64_t seen = 0;
  while (seen < messages) {
    const uint64_t seq = reader.seq();
    EXPECT(seq >= seen && seq <= messages);
    EXPECT(writer.waiter.counters.wakes <= reader.waiter.counters.sleeps + messages);
    seen = seq;
    std::this_thread::yield();
  }
  reading.join();
  writing.join();
  EXPECT(writer.seq() == messages);
}

void removal_frees_the_writer() {
  const Layout layout{2, 2, 64};
  Memory memory(layout);
  Writer writer(memory.data(), layout);
  Reader first(memory.data(), layout, 0);
  Reader second(memory.data(), layout, 1);
  EXPECT(!first.attach() && !second.attach());
  EXPECT(writer.admit() == 2);
  write(writer, 0, 0ns);
  write(writer, 1, 0ns);
  EXPECT(!writer.wait(0ns, 0ns));
  EXPECT(read(first, 0ns) == 0);
  EXPECT(writer.awaited() == std::vector<uint32_t>{1});
  EXPECT(writer.remove(1, SlotState::kEvicted));
  EXPECT(!writer.remove(1, SlotState::kEvicted));
  EXPECT(second.evicted() && !first.evicted());
  write(writer, 2, 0ns);
  EXPECT(read(first, 0ns) == 1 && read(first, 0ns) == 2);
  // Who takes the place again starts at what comes next.
  Reader third(memory.data(), layout, 1);
  EXPECT(!third.attach());
  EXPECT(!third.wait(0ns, 0ns));
  EXPECT(writer.admit() == 1);
  write(writer, 3, 0ns);
  EXPECT(read(third, 0ns) == 3 && third.seq() == 4);
}

}  // namespace

int main() {
  const auto messages = static_cast<uint64_t>(rounds(20'000));
  all_get_all(1, 1, 0ns, messages);
  all_get_all(1, 4, 50us, messages);
  all_get_all(3, 2, 0ns, messages);
  all_get_all(4, 8, 20us, messages);
  come_and_go(messages);
  counts_are_watched(messages);
  removal_frees_the_writer();
}
