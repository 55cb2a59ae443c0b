// Text as Python gave it: typed events may hold any code points.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace kvindex {

inline nanobind::str unicode(std::string_view text) {
  PyObject* const made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()),
                                              "surrogatepass");
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal<nanobind::str>(made);
}

}  // namespace kvindex
