// Hashes of payloads, by which one that comes again is known.
#pragma once

#include <nanobind/nanobind.h>

namespace kvindex {

void bind_fingerprints(nanobind::module_& module);

}  // namespace kvindex
