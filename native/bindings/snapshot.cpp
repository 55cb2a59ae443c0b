#include "bindings/snapshot.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "bindings/gil.hpp"
#include "core/snapshot.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

// The body of a rank's section, or None if the rank is gone.
std::optional<nb::bytes> dump(const PyIndex& self, uint32_t rank) {
  std::optional<std::string> body;
  {
    const GilReleased released;
    if (const auto image = self.index.image(rank)) body = write_image(*image);
  }
  if (!body) return std::nullopt;
  return nb::bytes(body->data(), body->size());
}

// The number of the restored rank; or a text that says what is wrong with the body; or how many
// blocks it has, how many there is room for, and which limit says so.
nb::object restore(PyIndex& self, std::optional<uint32_t> rank, nb::handle body) {
  const SimpleBuffer buffer(body);
  if (!buffer.open()) throw nb::type_error("no bytes");
  try {
    const uint32_t restored = [&] {
      const GilReleased released;
      return self.index.restore(rank, read_image(buffer.data(), buffer.size()));
    }();
    return nb::int_(restored);
  } catch (const ImageError& error) {
    return nb::str(error.what());
  } catch (const NoRoom& error) {
    return nb::make_tuple(error.wanted, error.room, error.what());
  }
}

}  // namespace

void bind_snapshots(nb::class_<PyIndex>& index) {
  index.def("dump", &dump, "rank"_a)
      .def("restore", &restore, "rank"_a.none(), "body"_a)
      .def("key_check", [](const PyIndex& self) { return self.index.key_check(); });
}

}  // namespace kvindex
