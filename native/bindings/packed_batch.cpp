#include "bindings/packed_batch.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/gil.hpp"
#include "core/decode.hpp"

namespace nb = nanobind;

namespace kvindex {

namespace {

constexpr size_t kMostSpare = 16;           // batches kept by a thread
constexpr size_t kMostSpareBytes = 1 << 17;  // of one of them

std::vector<Batch>& spare() {
  thread_local std::vector<Batch> batches;
  return batches;
}

// A count or an offset within a batch, where it has 32 bits.
uint32_t narrow(size_t size) {
  if (size > std::numeric_limits<uint32_t>::max()) {
    throw nb::value_error("a batch of more than 2**32 - 1 tokens, blocks or bytes: split it");
  }
  return static_cast<uint32_t>(size);
}

}  // namespace

PackedBatch::PackedBatch() {
  if (spare().empty()) return;
  batch = std::move(spare().back());
  spare().pop_back();
  batch.clear();
}

PackedBatch::~PackedBatch() {
  const size_t bytes = batch.capacity();
  if (bytes != 0 && bytes <= kMostSpareBytes && spare().size() < kMostSpare) {
    spare().push_back(std::move(batch));
  }
}

ByteRange PackedBatch::text(nb::bytes value) {
  const ByteRange range{narrow(batch.bytes.size()), narrow(value.size())};
  const auto* data = static_cast<const uint8_t*>(value.data());
  batch.bytes.insert(batch.bytes.end(), data, data + value.size());
  return range;
}

WireHash PackedBatch::hash(nb::handle value) {
  if (PyBytes_Check(value.ptr())) {
    const ByteRange range = text(nb::borrow<nb::bytes>(value));
    return {range.offset, range.length};
  }
  const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return {number, 0};
}

void PackedBatch::add_hashes(Event& event, nb::list hashes) {
  event.hashes_begin = narrow(batch.hashes.size());
  event.hashes_count = narrow(hashes.size());
  for (const nb::handle value : hashes) batch.hashes.push_back(hash(value));
}

void PackedBatch::add_tokens(Event& event, nb::bytes tokens) {
  const size_t count = tokens.size() / sizeof(uint64_t);
  const size_t begin = batch.wide.size();
  batch.wide.resize(begin + count);
  if (count != 0) std::memcpy(batch.wide.data() + begin, tokens.data(), count * sizeof(uint64_t));
  uint64_t all = 0;
  for (size_t i = begin; i < batch.wide.size(); ++i) all |= batch.wide[i];
  event.tokens_count = narrow(count);
  event.wide_tokens = all >> 32 != 0;
  if (event.wide_tokens) {
    event.tokens_begin = narrow(begin);
    return;
  }
  event.tokens_begin = narrow(batch.tokens.size());
  for (size_t i = begin; i < batch.wide.size(); ++i) {
    batch.tokens.push_back(static_cast<uint32_t>(batch.wide[i]));
  }
  batch.wide.resize(begin);
}

void PackedBatch::add_lookahead(Event& event, nb::list lookahead) {
  event.has_lookahead = true;
  event.lookahead_begin = narrow(batch.wide.size());
  event.lookahead_blocks = narrow(lookahead.size());
  for (size_t block = 0; block < lookahead.size(); ++block) {
    const auto tokens = nb::cast<nb::bytes>(lookahead[block]);
    const auto count = narrow(tokens.size() / sizeof(uint64_t));
    if (block == 0) event.lookahead = count;
    event.ragged_lookahead = event.ragged_lookahead || count != event.lookahead;
    const size_t begin = batch.wide.size();
    batch.wide.resize(begin + count);
    if (count != 0) std::memcpy(batch.wide.data() + begin, tokens.data(), count * sizeof(uint64_t));
  }
}

void PackedBatch::stored(nb::list hashes, nb::object parent, nb::bytes tokens, uint32_t block_size,
                         nb::bytes lora, nb::bytes medium,
                         std::optional<uint32_t> group_idx, nb::object spec_kind, std::optional<int64_t> spec_window,
                         nb::object lookahead, nb::object extras, nb::object salted_first,
                         bool content_hash) {
  Event event;
  event.kind = EventKind::stored;
  event.has_group = group_idx.has_value();
  event.group_idx = group_idx.value_or(0);
  event.block_size = block_size;
  event.lora = text(lora);
  event.medium = text(medium);
  event.content_hash = content_hash;
  add_hashes(event, hashes);
  if (!parent.is_none()) {
    event.has_parent = true;
    event.parent = hash(parent);
  }
  add_tokens(event, tokens);
  if (!lookahead.is_none()) add_lookahead(event, nb::cast<nb::list>(lookahead));
  if (!extras.is_none()) {
    event.has_extra_keys = true;
    event.extras_begin = narrow(batch.extras.size());
    for (const nb::handle extra : nb::cast<nb::list>(extras)) {
      batch.extras.push_back(text(nb::cast<nb::bytes>(extra)));
      ++event.extras_count;
    }
  }
  if (!salted_first.is_none()) {
    event.has_salt = true;
    event.salted_first = text(nb::cast<nb::bytes>(salted_first));
  }
  if (!spec_kind.is_none()) {
    event.has_kind = true;
    event.spec_kind = text(nb::cast<nb::bytes>(spec_kind));
  }
  if (spec_window) {
    event.has_window = true;
    event.spec_window = *spec_window;
  }
  batch.events.push_back(event);
}

void PackedBatch::removed(nb::list hashes, nb::bytes medium, uint32_t group_idx,
                          const std::optional<std::vector<uint32_t>>& copies_left) {
  Event event;
  event.kind = EventKind::removed;
  event.group_idx = group_idx;
  event.medium = text(medium);
  add_hashes(event, hashes);
  if (copies_left) {
    event.has_copies_left = true;
    event.copies_left_begin = narrow(batch.tokens.size());
    batch.tokens.insert(batch.tokens.end(), copies_left->begin(), copies_left->end());
  }
  batch.events.push_back(event);
}

void PackedBatch::cleared() {
  Event event;
  event.kind = EventKind::cleared;
  batch.events.push_back(event);
}

void PackedBatch::skipped(nb::bytes tag) { batch.skipped.push_back(text(tag)); }

void bind_packed_batch(nb::module_& module) {
  const auto dp_rank = [](const PackedBatch& packed) -> std::optional<int64_t> {
    if (packed.batch.dp_rank < 0) return std::nullopt;
    return packed.batch.dp_rank;
  };
  nb::class_<PackedBatch>(module, "PackedBatch")
      .def(nb::init<>())
      .def_prop_ro("ts", [](const PackedBatch& packed) { return packed.batch.ts; })
      .def_prop_ro("data_parallel_rank", dp_rank)
      .def_prop_ro("dp_rank", dp_rank)
      .def("__len__", [](const PackedBatch& packed) { return packed.batch.events.size(); })
      .def_prop_ro("blocks", [](const PackedBatch& packed) { return packed.batch.hashes.size(); })
      .def("stored", &PackedBatch::stored, nb::arg("hashes"), nb::arg("parent").none(),
           nb::arg("tokens"), nb::arg("block_size"), nb::arg("lora"), nb::arg("medium"),
           nb::arg("group_idx").none(), nb::arg("spec_kind").none(), nb::arg("spec_window").none(),
           nb::arg("lookahead").none(), nb::arg("extras").none(), nb::arg("salted_first").none(),
           nb::arg("content_hash"))
      .def("removed", &PackedBatch::removed, nb::arg("hashes"), nb::arg("medium"),
           nb::arg("group_idx"), nb::arg("copies_left").none())
      .def("cleared", &PackedBatch::cleared)
      .def("skipped", &PackedBatch::skipped);
  module.def(
      "decode",
      [](nb::bytes payload) -> std::optional<PackedBatch> {
        PackedBatch packed;
        const auto* data = static_cast<const uint8_t*>(payload.data());
        std::optional<GilReleased> released;
        if (payload.size() >= kLongPayload) released.emplace();
        const Verdict verdict = decode(data, payload.size(), packed.batch);
        released.reset();
        if (verdict == Verdict::unusual) return std::nullopt;
        return packed;
      },
      nb::arg("payload"));
}

}  // namespace kvindex
