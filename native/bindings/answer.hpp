// An answer as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "core/matching.hpp"

namespace kvindex {

struct PyAnswer {
  Answer answer;
  nanobind::object index;  // stays alive for the names of media
};

// The classes Answer, and RankRows for its columns.
void bind_answer(nanobind::module_& module);

}  // namespace kvindex
