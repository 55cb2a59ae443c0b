// The receiving of ordinary messages without the GIL, as kvindex/subscribe/watch.py uses it.
#pragma once

#include <nanobind/nanobind.h>

namespace kvindex {

void bind_intake(nanobind::module_& module);

}  // namespace kvindex
