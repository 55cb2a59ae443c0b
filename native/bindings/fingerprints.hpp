// Hashes of payloads, by which one that comes again is known.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "core/prefix_key.hpp"

namespace kvindex {

// Immutable: any thread may ask.
struct Fingerprints {
  explicit Fingerprints(nanobind::bytes secrets);

  int64_t of(nanobind::bytes payload) const;

  KeyMaker maker;
};

void bind_fingerprints(nanobind::module_& module);

}  // namespace kvindex
