// A rank's image as bytes, and back.
//
// What is read is bounded by the bytes that are there, and checked: an image that comes back can be
// restored. Layout: docs/snapshots.md.
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
