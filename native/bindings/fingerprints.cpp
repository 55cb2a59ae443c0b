#include "bindings/fingerprints.hpp"

#include <cstring>

namespace nb = nanobind;

namespace kvindex {

namespace {

KeyMaker::Secrets secret_words(nb::bytes secrets) {
  KeyMaker::Secrets words;
  if (secrets.size() != sizeof words) throw nb::value_error("secrets of a wrong size");
  std::memcpy(words.data(), secrets.data(), sizeof words);
  return words;
}

}  // namespace

Fingerprints::Fingerprints(nb::bytes secrets) : maker(secret_words(secrets)) {}

int64_t Fingerprints::of(nb::bytes payload) const {
  return static_cast<int64_t>(
      maker.fingerprint({static_cast<const char*>(payload.data()), payload.size()}));
}

void bind_fingerprints(nb::module_& module) {
  module.attr("FINGERPRINT_SECRET_BYTES") = sizeof(KeyMaker::Secrets);
  nb::class_<Fingerprints>(module, "Fingerprints")
      .def(nb::init<nb::bytes>(), nb::arg("secrets"))
      .def("of", &Fingerprints::of, nb::arg("payload"));
}

}  // namespace kvindex
