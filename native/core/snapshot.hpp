// A rank's image as bytes, and back.
//
// What is read is bounded by the bytes that are there, and checked: an image that comes back can be
// restored.
//
// kvindex/index/snapshot.py writes what is around it: sections and files. A change of what follows
// is a new version there.
//
// A body is a sequence of *numbers* (7 bits to a byte, the lowest first, the high bit set in all
// bytes but the last), *words* (8 bytes, little-endian), *texts* (a number, then so many bytes) and
// *labels* (a text of at least one byte, or an empty one and a word). A *list* is a number of
// items, and the items. *Copies* are a list of (place, count).
//
// 1. Shapes: list of (block size, lookahead). Namespaces: list of (block size, lookahead, LoRA
//    text). Places: list of (group, medium text, tokens of a chunk or 0).
// 2. Chains of 1 to 64 blocks, parents first: list of
//    - how many chains back the parent is, and the block in it that it follows; or 0 and 2 ×
//      namespace, + 1 if its prompts start under a salt or other extra keys;
//    - number of blocks;
//    - list of (2 × place + 1 if all blocks are held there; else 2 × place, and a word of bits);
//    - a word for each block, its key; a label for each block that is held anywhere.
// 3. Where copies differ from one in each place: list of (position, copies). Further labels of a
//    block: list of (position, label, copies). Labels of several blocks: list of (label, list of
//    positions, the oldest first). A position counts the blocks of all chains.
// 4. Held blocks without a place: list of (label, copies), the oldest first; list of (index in it,
//    parent label, namespace, two words of content digest, its size), in the order in which they
//    wait; how many were dropped.
// 5. Groups: list of (group, block size, flags, a word for the window, a word for the chunk, kind
//    text); flags: 1 the user set the kind, 2 the kind is known, 4 it has a window, 8 it has a
//    chunk size, 16 its size was stored off the device. Torn labels: list. Unknown event tags: list
//    of (text, count). Counters, reasons
//    of ignored blocks: two lists of numbers. Ambiguous labels and further copies counted so far.
//    The unit; the `hash_block_size`, or 0; the `offload_chunk`, or 0; list of the groups that EAGLE
//    drops a block of. Flags: 1 report mode "full", 2 its blocks' positions are unknown, 4 EAGLE drops
//    a block of every group, 8 `upper_bound`, 16 `resets_connector`, 32 blocks without a place were
//    dropped, 64 blocks were left out, 128 unknown events may have removed some, 256 `removals="last"`.
//
// A chain costs some 6 bytes beyond its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/rank_image.hpp"

namespace kvindex {

std::string write_image(const RankImage& image);

// Throws ImageError.
RankImage read_image(const uint8_t* data, size_t size);

}  // namespace kvindex
