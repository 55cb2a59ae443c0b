// Where everything lies in the ring's memory; kvindex/shm/ring/ring.py says the same.
//
//   0      header: magic, version, geometry (written once, before the memory has a name)
//          64 state · 128 `published` · 192 `space` · 256 next seq: words of a line each
//   4096   a slot of 64 bytes for each reader: state, spinning, start seq
//   …      a record for each chunk: seq, length, kind, then one written flag and a read flag for
//          each reader; up to 39 readers it is one line
//   …      the chunks, from a page's start
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvindex::shm {

struct Layout {
  uint32_t n_reader;
  uint32_t max_chunks;
  uint64_t max_chunk_bytes;

  static constexpr size_t kLine = 64;
  static constexpr size_t kPage = 4096;
  static constexpr size_t kState = 64;
  static constexpr size_t kPublished = 128;
  static constexpr size_t kSpace = 192;
  static constexpr size_t kNextSeq = 256;
  static constexpr size_t kSlotState = 0;
  static constexpr size_t kSlotSpinning = 4;
  static constexpr size_t kSlotStart = 8;
  static constexpr size_t kRecordSeq = 0;
  static constexpr size_t kRecordLength = 8;
  static constexpr size_t kRecordKind = 16;
  static constexpr size_t kRecordFlags = 24;  // written, then read by each reader

  static constexpr size_t up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

  size_t slot(uint32_t reader) const { return kPage + reader * kLine; }
  size_t record_bytes() const { return up(kRecordFlags + 1 + n_reader, kLine); }
  size_t record(uint32_t chunk) const { return slot(n_reader) + chunk * record_bytes(); }
  size_t chunk_bytes() const { return up(static_cast<size_t>(max_chunk_bytes), kLine); }
  size_t chunk(uint32_t index) const {
    return up(record(max_chunks), kPage) + index * chunk_bytes();
  }
  size_t total_bytes() const { return chunk(max_chunks); }
};

}  // namespace kvindex::shm
