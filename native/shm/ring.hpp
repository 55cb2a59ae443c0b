// A ring of chunks in shared memory: one writer, and readers that each read every chunk.
//
// Who writes what:
//   writer   `written` of each record, its seq, length and kind, the chunk's bytes; it clears the
//            read flags; the state word; `start` of a slot
//   reader   its own read flag (sets it), its own slot's state when it comes and goes
//   both     the two words to sleep on
//
// Why the order is safe. A chunk goes round in this order, on one line of memory:
//
//   writer:  bytes, length · written = 0 · read[r] = 0 (release) · written = 1 (seq_cst)
//   reader:  read[r] == 0 (acquire) · written == 1 (acquire) · bytes · read[r] = 1 (seq_cst)
//   writer:  read[r] == 1 for all (seq_cst) · bytes of the next lap · …
//
// A reader that sees its flag cleared has acquired `written = 0`, so a 1 that it then sees is the
// new lap's, and having acquired that it sees the bytes. The writer that has seen all flags set has
// acquired the readers' last look at the bytes. Nothing else is needed for the bytes.
//
// Why no wake-up is lost. A word to sleep on is odd while someone may be asleep on it. The sleeper
// makes it odd, looks at the flags again, and sleeps only while the word has that value. The waker
// sets the flag, then looks at the word, and makes it even and wakes if it is odd. All four are
// seq_cst (the flags `written` and `read`, and the slots' states, each where it is what is waited
// for), so they have one order: if the waker looked before the word was odd, then its flag was set
// before the sleeper looked again. A sleeper that was killed leaves an odd word: one wake-up
// for nobody.
//
// Readers that come late or go. The writer counts only readers whose slot is `reserved` (a place
// kept for one that will come) or `active`. A joiner sets `joining`; before its next message the
// writer sets the joiner's read flags, says in `start` which seq is its first, and makes it
// `active`. Nobody but the writer makes a reader count, so a reader's stream has an exact start.
// A reader may be evicted while it copies: it looks at its slot again after copying and throws the
// copy away, as with a seqlock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "shm/layout.hpp"

namespace kvindex::shm {

using Nanoseconds = std::chrono::nanoseconds;

enum class SlotState : uint32_t {
  kFree = 0,
  kReserved = 1,
  kJoining = 2,
  kActive = 3,
  kLeft = 4,
  kEvicted = 5,
};

// One process's view of a ring's memory, which must outlive it and have the layout's size.
class Ring {
 public:
  Ring(uint8_t* memory, Layout layout) : memory_(memory), layout_(layout) {}

  const Layout& layout() const { return layout_; }
  uint8_t* chunk(uint32_t index) const { return memory_ + layout_.chunk(index); }

  std::atomic_ref<uint32_t> state() const { return word32(Layout::kState); }
  std::atomic_ref<uint32_t> published() const { return word32(Layout::kPublished); }
  std::atomic_ref<uint32_t> space() const { return word32(Layout::kSpace); }
  std::atomic_ref<uint64_t> next_seq() const { return word64(Layout::kNextSeq); }

  std::atomic_ref<uint32_t> slot_state(uint32_t reader) const {
    return word32(layout_.slot(reader) + Layout::kSlotState);
  }
  std::atomic_ref<uint32_t> spinning(uint32_t reader) const {
    return word32(layout_.slot(reader) + Layout::kSlotSpinning);
  }
  std::atomic_ref<uint64_t> start(uint32_t reader) const {
    return word64(layout_.slot(reader) + Layout::kSlotStart);
  }

  std::atomic_ref<uint64_t> seq(uint32_t chunk) const {
    return word64(layout_.record(chunk) + Layout::kRecordSeq);
  }
  std::atomic_ref<uint64_t> length(uint32_t chunk) const {
    return word64(layout_.record(chunk) + Layout::kRecordLength);
  }
  std::atomic_ref<uint32_t> kind(uint32_t chunk) const {
    return word32(layout_.record(chunk) + Layout::kRecordKind);
  }
  std::atomic_ref<uint8_t> written(uint32_t chunk) const {
    return std::atomic_ref<uint8_t>(memory_[layout_.record(chunk) + Layout::kRecordFlags]);
  }
  std::atomic_ref<uint8_t> read_flag(uint32_t chunk, uint32_t reader) const {
    return std::atomic_ref<uint8_t>(
        memory_[layout_.record(chunk) + Layout::kRecordFlags + 1 + reader]);
  }

  // Whether the writer must wait for this reader.
  bool counts(uint32_t reader) const;

 private:
  std::atomic_ref<uint32_t> word32(size_t at) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(memory_ + at));
  }
  std::atomic_ref<uint64_t> word64(size_t at) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory_ + at));
  }

  uint8_t* memory_;
  Layout layout_;
};

// A number that its party's thread counts up and any thread may read.
class Count {
 public:
  Count() = default;
  Count& operator=(uint64_t value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Count& operator++() { return *this = *this + 1; }
  operator uint64_t() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// How often one party spun, slept and woke others.
struct WaitCounters {
  Count spins;
  Count sleeps;
  Count wakes;
};

// One party's waiting on one of the two words.
//
// It spins only while it may expect to be served within `spin`: waits grow into a moving average,
// and an idle party does not spin at all.
class Waiter {
 public:
  Waiter(uint8_t* memory, size_t word) : word_(reinterpret_cast<uint32_t*>(memory + word)) {}

  // Wait until `ready()`; false if it is not when a wake-up or `sleep` ends the wait. To be called
  // again, the wait being one as long as it fails.
  template <class Ready, class MaySpin, class NoteSpin>
  bool wait(Ready ready, MaySpin may_spin, NoteSpin note_spin, Nanoseconds spin, Nanoseconds sleep);

  // Note that there was nothing to wait for; the clock is not asked, on the way that must be fast.
  void served_at_once() {
    waiting_ = false;
    expected_ -= expected_ / 4;
  }

  // Wake whoever sleeps on the word, after what they wait for has been stored (seq_cst).
  static bool poke(uint32_t* word);

  // Make every wait on this word return, in whichever process; they find nothing and wait again.
  void interrupt();

  WaitCounters counters;

 private:
  using Clock = std::chrono::steady_clock;

  template <class Ready>
  bool spin_until(Ready ready, Nanoseconds spin);
  template <class Ready>
  bool yield_until(Ready ready);
  void served(Nanoseconds spin);

  uint32_t* word_;
  bool waiting_ = false;  // in a wait that has failed so far
  bool spun_ = false;     // in this wait
  Clock::time_point since_{};
  Nanoseconds expected_{0};  // moving average of how long waits are, up to four times `spin`
};

// The writing party. For one thread at a time.
class Writer {
 public:
  Writer(uint8_t* memory, Layout layout);

  // Wait until the next chunk may be written; see `Waiter::wait`.
  bool wait(Nanoseconds spin, Nanoseconds sleep);
  bool ready() const;

  uint32_t index() const { return index_; }
  uint8_t* chunk() const { return ring_.chunk(index_); }
  uint64_t seq() const { return seq_; }

  // Publish the next chunk, whose first `length` bytes were written.
  void publish(uint32_t kind, uint64_t length);

  // Let joiners in, from the next message on; returns how many.
  uint32_t admit();

  // The readers that have not read what the next chunk still holds.
  std::vector<uint32_t> awaited() const;

  // Stop counting a reader, and say so in its slot: `kFree` for one that is gone, `kEvicted` for one
  // that may still be there or come. False if it did not count: the slot may be another's already.
  bool remove(uint32_t reader, SlotState state);

  // Wait until no reserved place is without its reader.
  bool wait_attached(Nanoseconds sleep);

  void set_state(uint32_t state);
  const Ring& ring() const { return ring_; }
  Waiter waiter;

 private:
  Ring ring_;
  uint32_t* published_;
  uint32_t index_ = 0;
  Count seq_;
};

// A reading party. For one thread at a time.
class Reader {
 public:
  Reader(uint8_t* memory, Layout layout, uint32_t slot);

  // Take the slot, whose lock the caller holds. True if its place had been kept from the start;
  // else the writer lets it in later.
  bool attach();
  void leave();

  // Wait until the next message is there; see `Waiter::wait`.
  bool wait(Nanoseconds spin, Nanoseconds sleep);
  bool ready();

  // Whether the writer counts this reader.
  bool active() const;
  // Whether it does not any more: now, after everything that was read before.
  bool evicted() const;

  // Whether the chunk holds the seq that must follow and a length that fits.
  bool sound() const;

  uint32_t index() const { return index_; }
  uint64_t seq() const { return seq_; }
  uint64_t length() const { return ring_.length(index_).load(std::memory_order_relaxed); }
  uint32_t kind() const { return ring_.kind(index_).load(std::memory_order_relaxed); }
  const uint8_t* chunk() const { return ring_.chunk(index_); }

  // Give the chunk back, and go on to the next.
  void release();

  // Wait until the state word has one of these bits.
  bool wait_state(uint32_t bits, Nanoseconds sleep);

  const Ring& ring() const { return ring_; }
  Waiter waiter;

 private:
  bool start();
  bool may_spin() const;

  Ring ring_;
  uint32_t* space_;
  uint32_t slot_;
  uint32_t index_ = 0;
  Count seq_;
  bool started_ = false;
};

}  // namespace kvindex::shm
