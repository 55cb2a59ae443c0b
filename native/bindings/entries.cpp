// The entries of a fan-out's message, most of which are batches: these are applied in one call.
#include "bindings/entries.hpp"

#include <vector>

#include "bindings/gil.hpp"
#include "core/decode.hpp"
#include "core/entry_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

constexpr size_t kMostEntryBlocks = size_t{1} << 17;  // as kvindex.wire.decode.MAX_BLOCKS
constexpr size_t kKeptBytes = size_t{4} << 20;        // of a thread's batch between messages
constexpr int64_t kUnknown = -1;

// The number of the rank that is encoded so.
int64_t find_rank(const nb::dict& ranks, std::string_view encoded) {
  const nb::bytes name(encoded.data(), encoded.size());
  const nb::handle id = PyDict_GetItemWithError(ranks.ptr(), name.ptr());
  if (id.is_valid()) return nb::cast<uint32_t>(id);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return kUnknown;
}

bool apply_entry(Index& index, const Entry& entry, int64_t rank, Batch& batch) {
  const auto* data = reinterpret_cast<const uint8_t*>(entry.payload.data());
  return rank != kUnknown && decode(data, entry.payload.size(), batch) == Verdict::decoded &&
         batch.hashes.size() <= kMostEntryBlocks &&
         index.apply(static_cast<uint32_t>(rank), batch);
}

// Apply batches until an entry needs Python: one that is neither a batch nor a status, or a batch
// that is unusual or of an unknown rank. Return how many were applied, and the other entries in
// their order: the statuses before that entry, and all from there on. None if these are no entries.
nb::object apply_entries(PyIndex& self, const nb::dict& ranks, nb::handle encoded) {
  const SimpleBuffer buffer(encoded);
  if (!buffer.open()) throw nb::type_error("no bytes");
  std::vector<Entry> entries;
  if (!read_entries(buffer.data(), buffer.size(), entries)) return nb::none();
  std::vector<int64_t> ids;
  for (const Entry& entry : entries) {
    if (entry.kind == Entry::Kind::other) break;
    ids.push_back(entry.kind == Entry::Kind::batch ? find_rank(ranks, entry.rank) : kUnknown);
  }
  size_t applied = 0, at = 0;
  const auto work = [&] {
    thread_local Batch batch;
    for (; at < ids.size(); ++at) {
      if (entries[at].kind == Entry::Kind::status) continue;
      if (!apply_entry(self.index, entries[at], ids[at], batch)) break;
      ++applied;
    }
    if (batch.capacity() > kKeptBytes) batch = Batch();
  };
  if (buffer.size() < kLongPayload) {
    const GilUntilWaiting gil;
    work();
  } else {
    const GilReleased released;
    work();
  }
  nb::list left;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i < at && entries[i].kind == Entry::Kind::batch) continue;
    left.append(nb::bytes(entries[i].whole.data(), entries[i].whole.size()));
  }
  return nb::make_tuple(applied, left);
}

}  // namespace

void bind_entries(nb::class_<PyIndex>& index) {
  index.def("apply_entries", &apply_entries, "ranks"_a, "entries"_a);
}

}  // namespace kvindex
