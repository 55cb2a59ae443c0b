#include "shm/ring.hpp"

#include <algorithm>
#include <thread>

#include "shm/futex.hpp"

namespace kvindex::shm {

namespace {

constexpr int kPausesPerLook = 16;

// Where more parties wait than may spin, and messages come quickly, letting the others run a few
// times is cheaper than to sleep and be woken for each.
constexpr int kYields = 32;
constexpr Nanoseconds kWorthYielding{100'000};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // longer than `yield`, which many cores take for nothing
#endif
}

SlotState state_of(const Ring& ring, uint32_t reader) {
  return static_cast<SlotState>(ring.slot_state(reader).load());
}

}  // namespace

bool Ring::counts(uint32_t reader) const {
  const SlotState state = state_of(*this, reader);
  return state == SlotState::kActive || state == SlotState::kReserved;
}

// Waiter -----------------------------------------------------------------------------------------

template <class Ready, class MaySpin, class NoteSpin>
bool Waiter::wait(Ready ready, MaySpin may_spin, NoteSpin note_spin, Nanoseconds spin,
                  Nanoseconds sleep) {
  if (!waiting_) {
    if (ready()) {
      served_at_once();
      return true;
    }
    waiting_ = true;
    spun_ = false;
    since_ = Clock::now();
  }
  if (!spun_ && expected_ < spin) {
    spun_ = true;
    bool found = false;
    if (may_spin()) {
      ++counters.spins;
      note_spin(true);
      found = spin_until(ready, spin);
      note_spin(false);
    } else if (expected_ < kWorthYielding) {
      found = yield_until(ready);
    }
    if (found) {
      served(spin);
      return true;
    }
  }
  if (ready()) {
    served(spin);
    return true;
  }
  if (sleep <= Nanoseconds{0}) return false;
  std::atomic_ref<uint32_t> word(*word_);
  uint32_t value = word.load();
  while (value % 2 == 0 && !word.compare_exchange_weak(value, value + 1)) {
  }
  if (value % 2 == 0) ++value;
  if (!ready()) {
    ++counters.sleeps;
    futex_wait(word_, value, sleep);
    if (!ready()) return false;
  }
  served(spin);
  return true;
}

template <class Ready>
bool Waiter::spin_until(Ready ready, Nanoseconds spin) {
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) pause();
    if (ready()) return true;
    std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

template <class Ready>
bool Waiter::yield_until(Ready ready) {
  for (int i = 0; i < kYields; ++i) {
    std::this_thread::yield();
    if (ready()) return true;
  }
  return false;
}

void Waiter::served(Nanoseconds spin) {
  waiting_ = false;
  const Nanoseconds waited = std::min<Nanoseconds>(Clock::now() - since_, 4 * spin);
  expected_ += (waited - expected_) / 4;
}

bool Waiter::poke(uint32_t* word) {
  std::atomic_ref<uint32_t> shared(*word);
  uint32_t value = shared.load();
  // Where the exchange fails another waker was quicker, and wakes.
  if (value % 2 == 0 || !shared.compare_exchange_strong(value, value + 1)) return false;
  futex_wake(word);
  return true;
}

void Waiter::interrupt() {
  std::atomic_ref<uint32_t>(*word_).fetch_add(2);
  futex_wake(word_);
}

// Writer -----------------------------------------------------------------------------------------

Writer::Writer(uint8_t* memory, Layout layout)
    : waiter(memory, Layout::kSpace),
      ring_(memory, layout),
      published_(reinterpret_cast<uint32_t*>(memory + Layout::kPublished)) {}

bool Writer::ready() const {
  if (ring_.written(index_).load(std::memory_order_relaxed) == 0) return true;
  for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
    if (ring_.read_flag(index_, reader).load() == 0 && ring_.counts(reader)) return false;
  }
  return true;
}

bool Writer::wait(Nanoseconds spin, Nanoseconds sleep) {
  return waiter.wait([this] { return ready(); }, [] { return true; }, [](bool) {}, spin, sleep);
}

void Writer::publish(uint32_t kind, uint64_t length) {
  constexpr auto relaxed = std::memory_order_relaxed;
  ring_.seq(index_).store(seq_, relaxed);
  ring_.length(index_).store(length, relaxed);
  ring_.kind(index_).store(kind, relaxed);
  ring_.written(index_).store(0, relaxed);
  for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
    ring_.read_flag(index_, reader).store(ring_.counts(reader) ? 0 : 1, std::memory_order_release);
  }
  ring_.written(index_).store(1);
  ++seq_;
  index_ = index_ + 1 == ring_.layout().max_chunks ? 0 : index_ + 1;
  ring_.next_seq().store(seq_, relaxed);
  if (Waiter::poke(published_)) ++waiter.counters.wakes;
}

uint32_t Writer::admit() {
  uint32_t admitted = 0;
  for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
    if (state_of(ring_, reader) != SlotState::kJoining) continue;
    // The flags of one that is not let in after all do no harm.
    for (uint32_t chunk = 0; chunk < ring_.layout().max_chunks; ++chunk) {
      ring_.read_flag(chunk, reader).store(1, std::memory_order_relaxed);
    }
    ring_.start(reader).store(seq_, std::memory_order_relaxed);
    uint32_t joining = static_cast<uint32_t>(SlotState::kJoining);
    const auto active = static_cast<uint32_t>(SlotState::kActive);
    admitted += ring_.slot_state(reader).compare_exchange_strong(joining, active) ? 1 : 0;
  }
  if (admitted != 0 && Waiter::poke(published_)) ++waiter.counters.wakes;
  return admitted;
}

std::vector<uint32_t> Writer::awaited() const {
  std::vector<uint32_t> readers;
  if (ring_.written(index_).load(std::memory_order_relaxed) == 0) return readers;
  for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
    if (ring_.read_flag(index_, reader).load() == 0 && ring_.counts(reader)) {
      readers.push_back(reader);
    }
  }
  return readers;
}

bool Writer::remove(uint32_t reader, SlotState state) {
  auto shared = ring_.slot_state(reader);
  uint32_t counted = shared.load();
  do {
    if (counted != static_cast<uint32_t>(SlotState::kActive) &&
        counted != static_cast<uint32_t>(SlotState::kReserved)) {
      return false;
    }
  } while (!shared.compare_exchange_weak(counted, static_cast<uint32_t>(state)));
  ring_.spinning(reader).store(0, std::memory_order_relaxed);
  Waiter::poke(published_);
  return true;
}

bool Writer::wait_attached(Nanoseconds sleep) {
  const auto attached = [this] {
    for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
      if (ring_.slot_state(reader).load() == static_cast<uint32_t>(SlotState::kReserved)) {
        return false;
      }
    }
    return true;
  };
  return waiter.wait(attached, [] { return false; }, [](bool) {}, Nanoseconds{0}, sleep);
}

void Writer::set_state(uint32_t state) {
  ring_.state().store(state);
  Waiter::poke(published_);
}

// Reader -----------------------------------------------------------------------------------------

Reader::Reader(uint8_t* memory, Layout layout, uint32_t slot)
    : waiter(memory, Layout::kPublished),
      ring_(memory, layout),
      space_(reinterpret_cast<uint32_t*>(memory + Layout::kSpace)),
      slot_(slot) {}

bool Reader::attach() {
  auto state = ring_.slot_state(slot_);
  uint32_t reserved = static_cast<uint32_t>(SlotState::kReserved);
  const bool kept =
      state.compare_exchange_strong(reserved, static_cast<uint32_t>(SlotState::kActive));
  // Whoever had the slot is gone, for its lock is ours.
  if (!kept) state.store(static_cast<uint32_t>(SlotState::kJoining));
  ring_.spinning(slot_).store(0, std::memory_order_relaxed);
  Waiter::poke(space_);
  return kept;
}

void Reader::leave() {
  ring_.spinning(slot_).store(0, std::memory_order_relaxed);
  ring_.slot_state(slot_).store(static_cast<uint32_t>(SlotState::kLeft));
  Waiter::poke(space_);
}

bool Reader::start() {
  if (!active()) return false;
  seq_ = ring_.start(slot_).load(std::memory_order_relaxed);
  index_ = static_cast<uint32_t>(seq_ % ring_.layout().max_chunks);
  started_ = true;
  return true;
}

bool Reader::ready() {
  if (!started_ && !start()) return false;
  // The first look is one of the sleeper's; the last knows that the flag it follows was cleared.
  return ring_.written(index_).load() == 1 &&
         ring_.read_flag(index_, slot_).load(std::memory_order_acquire) == 0 &&
         ring_.written(index_).load(std::memory_order_acquire) == 1;
}

bool Reader::wait(Nanoseconds spin, Nanoseconds sleep) {
  return waiter.wait([this] { return ready(); }, [this] { return may_spin(); },
                     [this](bool on) {
                       ring_.spinning(slot_).store(on ? 1 : 0, std::memory_order_relaxed);
                     },
                     spin, sleep);
}

bool Reader::may_spin() const {
  // One core is left for the writer, which the spinning wait for.
  static const unsigned most = std::max(1U, std::thread::hardware_concurrency() - 1);
  unsigned spinning = 0;
  for (uint32_t reader = 0; reader < ring_.layout().n_reader; ++reader) {
    spinning += ring_.spinning(reader).load(std::memory_order_relaxed);
  }
  return spinning < most;
}

bool Reader::active() const { return state_of(ring_, slot_) == SlotState::kActive; }

bool Reader::evicted() const {
  // Read by a read-modify-write, which what was copied before cannot be put off past.
  auto shared = ring_.slot_state(slot_);
  const auto state = static_cast<SlotState>(shared.fetch_or(0, std::memory_order_acq_rel));
  return state != SlotState::kActive && state != SlotState::kJoining;
}

bool Reader::sound() const {
  return ring_.seq(index_).load(std::memory_order_relaxed) == seq_ &&
         length() <= ring_.layout().max_chunk_bytes;
}

bool Reader::wait_state(uint32_t bits, Nanoseconds sleep) {
  return waiter.wait([this, bits] { return (ring_.state().load() & bits) != 0; },
                     [] { return false; }, [](bool) {}, Nanoseconds{0}, sleep);
}

void Reader::release() {
  ring_.read_flag(index_, slot_).store(1);
  ++seq_;
  index_ = index_ + 1 == ring_.layout().max_chunks ? 0 : index_ + 1;
  Waiter::poke(space_);
}

}  // namespace kvindex::shm
