#include "core/strand.hpp"

#include <algorithm>

namespace kvindex {

void Strand::reserve(unsigned blocks) {
  if (blocks <= capacity) return;
  // A chain that grows block by block doubles; a whole one gets what it needs.
  const unsigned wanted = std::max(blocks, std::min(2u * capacity, kStrandBlocks));
  const unsigned made = std::min((wanted + 3) / 4 * 4, kStrandBlocks);
  auto larger = std::make_unique_for_overwrite<Key[]>(made);
  std::copy(keys.get(), keys.get() + count, larger.get());
  keys = std::move(larger);
  capacity = static_cast<uint8_t>(made);
}

void Strand::fit() {
  const unsigned wanted = (count + 3u) / 4 * 4;
  if (wanted * 2 > capacity) return;
  auto smaller = std::make_unique_for_overwrite<Key[]>(wanted);
  std::copy(keys.get(), keys.get() + count, smaller.get());
  keys = std::move(smaller);
  capacity = static_cast<uint8_t>(wanted);
}

StrandId StrandPool::make() {
  if (open_.empty()) {
    if ((chunks_.size() + 1) << kChunkBits > kMostStrands) return kNoStrand;
    open_.push_back(static_cast<uint32_t>(chunks_.size()));
    chunks_.emplace_back();
  }
  const uint32_t number = open_.back();
  Chunk& chunk = chunks_[number];
  if (chunk.strands == nullptr) {
    chunk.strands = std::make_unique<Strand[]>(kChunkMask + 1);
    chunk.free.resize(kChunkMask + 1);
    for (uint32_t i = 0; i <= kChunkMask; ++i) chunk.free[i] = static_cast<uint8_t>(kChunkMask - i);
  }
  const uint32_t place = chunk.free.back();
  chunk.free.pop_back();
  if (chunk.free.empty()) open_.pop_back();
  ++size_;
  return number << kChunkBits | place;
}

void StrandPool::drop(StrandId id) {
  const uint32_t number = id >> kChunkBits;
  Chunk& chunk = chunks_[number];
  chunk.strands[id & kChunkMask] = Strand{};
  chunk.free.push_back(static_cast<uint8_t>(id & kChunkMask));
  if (chunk.free.size() == 1) open_.push_back(number);
  if (chunk.free.size() > kChunkMask) {
    chunk.strands.reset();
    chunk.free = std::vector<uint8_t>();
  }
  if (--size_ == 0) {
    chunks_ = std::vector<Chunk>();
    open_ = std::vector<uint32_t>();
  }
}

}  // namespace kvindex
