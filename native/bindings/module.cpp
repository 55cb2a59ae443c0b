// The extension module kvindex.wire._native: the core, in the forms that kvindex/index/native.py wants.
//
// The GIL is released for work that is long beside a hand-over of it: payloads of kLongPayload
// bytes and more, prompts of more than kFirstTokens tokens. It is never waited for while the
// index is locked, and the index is never waited for while it is held: what calls into it holds a
// GilReleased or a GilUntilWaiting.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bindings/answer.hpp"
#include "bindings/entries.hpp"
#include "bindings/fingerprints.hpp"
#include "bindings/gil.hpp"
#include "bindings/intake.hpp"
#include "bindings/packed_batch.hpp"
#include "bindings/prefixes.hpp"
#include "bindings/py_index.hpp"
#include "bindings/queries.hpp"
#include "bindings/ring.hpp"
#include "bindings/routing.hpp"
#include "bindings/snapshot.hpp"
#include "bindings/tokens.hpp"
#include "bindings/unicode.hpp"
#include "core/decode.hpp"
#include "core/invariant.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvindex {

namespace {

constexpr size_t kFirstTokens = 1024;
constexpr size_t kMostKept = size_t{4} << 20;  // bytes of a thread's batch between payloads

// Do something short that asks the index, without the GIL if that has to be waited for.
template <class Work>
auto waiting_freely(Work&& work) {
  const GilUntilWaiting gil;
  return work();
}

// What `apply` says: kvindex/index/native.py knows these numbers.
enum class Applied : int { done, unknown_rank, unusual };

Applied apply_batch(PyIndex& self, uint32_t rank, const Batch& batch) {
  return self.index.apply(rank, batch) ? Applied::done : Applied::unknown_rank;
}

Applied apply_payload(PyIndex& self, uint32_t rank, const uint8_t* data, size_t size) {
  const auto work = [&] {
    thread_local Batch batch;
    const bool is_decoded = decode(data, size, batch) == Verdict::decoded;
    const Applied applied = is_decoded ? apply_batch(self, rank, batch) : Applied::unusual;
    if (batch.capacity() > kMostKept) batch = Batch();
    return applied;
  };
  if (size < kLongPayload) {
    const GilUntilWaiting gil;
    return work();
  }
  const GilReleased released;
  return work();
}

Applied apply_packed(PyIndex& self, uint32_t rank, const Batch& batch) {
  // A token has four bytes, and a hash nine at most.
  if (batch.tokens.size() * 4 + batch.wide.size() * 8 + batch.hashes.size() * 9 < kLongPayload) {
    const GilUntilWaiting gil;
    return apply_batch(self, rank, batch);
  }
  const GilReleased released;
  return apply_batch(self, rank, batch);
}

// Apply a PackedBatch or a payload; whatever else it is, is unusual.
int apply(PyIndex& self, uint32_t rank, nb::handle batch) {
  Applied applied = Applied::unusual;
  if (PyBytes_CheckExact(batch.ptr())) {
    applied = apply_payload(self, rank,
                            reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(batch.ptr())),
                            static_cast<size_t>(PyBytes_GET_SIZE(batch.ptr())));
  } else if (const PackedBatch* packed; nb::try_cast(batch, packed) && packed != nullptr) {
    applied = apply_packed(self, rank, packed->batch);
  } else if (const SimpleBuffer buffer(batch); buffer.open()) {
    applied = apply_payload(self, rank, buffer.data(), buffer.size());
  }
  return static_cast<int>(applied);
}

// Answer one query about a prompt but its last `left_out` tokens; false if it cannot be read here.
bool answer_query(const PyIndex& self, nb::handle token_ids, size_t left_out, Query& query,
                  Answer& answer) {
  PromptTokens tokens(token_ids, left_out);
  if (!tokens.read()) return false;
  // A prompt's beginning often decides: convert that much, and look without letting the GIL go.
  const bool is_short = tokens.view().length <= kFirstTokens;
  if (!tokens.convert(is_short ? tokens.view().length : kFirstTokens)) return false;
  query.tokens = tokens.view();
  const bool look_first = is_short || query.tokens.ready < query.tokens.length;
  if (look_first && self.index.try_match(query, answer) && !answer.starved) return true;
  if (!tokens.convert(tokens.view().length)) return false;
  query.tokens = tokens.view();
  const GilReleased released;
  self.index.match(query, answer);
  return true;
}

std::string text(nb::bytes value) {
  return {static_cast<const char*>(value.data()), value.size()};
}

std::vector<std::string> texts(nb::list values) {
  std::vector<std::string> all;
  for (const nb::handle value : values) all.push_back(text(nb::cast<nb::bytes>(value)));
  return all;
}

Query make_query(nb::bytes lora, nb::list extras, std::optional<nb::list> media,
                 std::optional<std::vector<uint32_t>> ranks, uint32_t block_size) {
  Query query;
  query.lora = text(lora);
  query.extras = texts(extras);
  if (media) query.media = texts(*media);
  query.ranks = std::move(ranks);
  if (query.ranks) std::sort(query.ranks->begin(), query.ranks->end());
  query.block_size = block_size;
  return query;
}

// The answer to a query, and (rank id, group, medium, block size, lookahead, spans) of all that is
// held of the prompt, which is a buffer.
nb::tuple look(nb::handle self, nb::handle token_ids, Query query) {
  PromptTokens tokens(token_ids);
  if (!tokens.read() || !tokens.convert(tokens.view().length)) throw nb::type_error("no tokens");
  query.tokens = tokens.view();
  PyAnswer answer;
  std::vector<Holding> holdings;
  {
    const PyIndex& index = nb::cast<PyIndex&>(self);
    const GilReleased released;
    index.index.look(query, answer.answer, holdings);
  }
  answer.index = nb::borrow(self);
  nb::list all;
  for (const Holding& holding : holdings) {
    nb::list spans;
    for (const auto& [start, stop] : holding.spans) spans.append(nb::make_tuple(start, stop));
    all.append(nb::make_tuple(holding.rank, holding.group_idx, unicode(holding.medium),
                              holding.block_size, holding.lookahead, spans));
  }
  return nb::make_tuple(nb::cast(std::move(answer)), all);
}

std::optional<nb::list> salts(const PyIndex& self, uint32_t rank) {
  const auto found = [&] {
    const GilReleased released;
    return self.index.salts(rank);
  }();
  if (!found) return std::nullopt;
  nb::list all;
  for (const auto& [lora, extra] : *found) {
    all.append(nb::make_tuple(nb::bytes(lora.data(), lora.size()),
                              nb::bytes(extra.data(), extra.size())));
  }
  return all;
}

// The answer to a query, or None if the tokens, or how many are left out, cannot be read here.
nb::object match_one(nb::handle self, nb::handle token_ids, nb::handle recomputed, Query& query) {
  PyAnswer answer;
  const Py_ssize_t left_out = PyLong_Check(recomputed.ptr()) ? PyLong_AsSsize_t(recomputed.ptr()) : -1;
  if (left_out < 0) {
    PyErr_Clear();
    return nb::none();
  }
  if (!answer_query(nb::cast<PyIndex&>(self), token_ids, static_cast<size_t>(left_out), query,
                    answer.answer)) {
    return nb::none();
  }
  answer.index = nb::borrow(self);
  return nb::cast(std::move(answer));
}

nb::dict groups_dict(const std::map<uint32_t, Group>& groups) {
  nb::dict all;
  for (const auto& [group_idx, group] : groups) {
    nb::dict entry;
    entry["kind"] = unicode(group.spec.kind);
    entry["known"] = group.kind_known;
    entry["sliding_window"] = group.spec.sliding_window;
    entry["attention_chunk_size"] = group.spec.attention_chunk_size;
    entry["block_size"] = group.block_size;
    all[nb::str(std::to_string(group_idx).c_str())] = entry;
  }
  return all;
}

template <class Names, class Values>
nb::dict named_counts(const Names& names, const Values& values, bool zeros) {
  nb::dict all;
  for (size_t i = 0; i < names.size(); ++i) {
    if (values[i] != 0 || zeros) all[names[i]] = values[i];
  }
  return all;
}

std::optional<nb::dict> rank_statistics(const PyIndex& self, uint32_t rank) {
  const auto statistics = waiting_freely([&] { return self.index.statistics(rank); });
  if (!statistics) return std::nullopt;
  nb::dict all = named_counts(kCounterNames, statistics->counters, true);
  all["blocks"] = statistics->blocks;
  all["orphans"] = statistics->orphans;
  all["orphans_dropped"] = statistics->orphans_dropped;
  all["ambiguous"] = statistics->ambiguous;
  all["duplicates"] = statistics->duplicates;
  all["salted"] = statistics->salted;
  nb::dict loras;  // by tag: kvindex/index/native.py names them
  for (const auto& [tag, count] : statistics->loras) {
    loras[nb::bytes(tag.data(), tag.size())] = count;
  }
  all["loras"] = loras;
  nb::dict media;
  for (const auto& [medium, count] : statistics->media) {
    media[unicode(medium)] = count;
  }
  all["media"] = media;
  all["ignored"] = named_counts(kIgnoredNames, statistics->ignored, false);
  nb::dict skipped;
  for (const auto& [tag, count] : statistics->skipped) {
    skipped[unicode(tag)] = count;
  }
  all["skipped"] = skipped;
  all["groups"] = groups_dict(statistics->groups);
  return all;
}

nb::dict tree_statistics(const PyIndex& self) {
  const auto statistics = waiting_freely([&] { return self.index.statistics(); });
  nb::dict all;
  all["blocks"] = statistics.blocks;
  all["unique_blocks"] = statistics.unique_blocks;
  all["runs"] = statistics.runs;
  return all;
}

// (label, depth, medium, group, copies, block size, LoRA tag) of each resident block in each place.
std::optional<nb::list> walk(const PyIndex& self, uint32_t rank) {
  const auto resident = [&] {
    const GilReleased released;
    return self.index.walk(rank);
  }();
  if (!resident) return std::nullopt;
  nb::list all;
  for (const ResidentBlock& block : *resident) {
    const nb::object label = block.name.empty()
                                 ? nb::object(nb::int_(block.value))
                                 : nb::object(nb::bytes(block.name.data(), block.name.size()));
    all.append(nb::make_tuple(label, block.depth, unicode(block.medium), block.group_idx, block.copies,
                              block.name_space.block_size,
                              nb::bytes(block.name_space.lora.data(), block.name_space.lora.size())));
  }
  return all;
}

std::optional<std::string> check(const PyIndex& self) {
  try {
    const GilReleased released;
    self.index.check();
  } catch (const InvariantError& error) {
    return error.what();
  }
  return std::nullopt;
}

using PlainSpec = std::tuple<std::string, std::optional<int64_t>, std::optional<int64_t>>;

bool configure(PyIndex& self, uint32_t rank, const std::map<uint32_t, PlainSpec>& groups,
               bool removes_last, bool reports_full, bool eagle,
               const std::vector<uint32_t>& eagle_groups, uint32_t hash_block_size,
               uint32_t offload_chunk, bool upper_bound, bool resets_connector) {
  CacheSettings settings{{}, removes_last, reports_full, eagle,
                         {eagle_groups.begin(), eagle_groups.end()},
                         hash_block_size, offload_chunk, upper_bound, resets_connector};
  for (const auto& [group_idx, spec] : groups) {
    settings.groups[group_idx] = {std::get<0>(spec), std::get<1>(spec), std::get<2>(spec)};
  }
  return waiting_freely([&] { return self.index.configure(rank, settings); });
}

// What a query cannot do without, for benchmarks: converting tokens, and hashing them.
size_t floor_convert(nb::handle token_ids) {
  PromptTokens tokens(token_ids);
  if (!tokens.read() || !tokens.convert(tokens.view().length)) throw nb::type_error("no tokens");
  return tokens.view().ready;
}

uint64_t floor_hash(nb::handle token_ids, uint32_t block_size) {
  PromptTokens tokens(token_ids);
  if (!tokens.read() || !tokens.convert(tokens.view().length)) throw nb::type_error("no tokens");
  static const KeyMaker maker(KeyMaker::Secrets{1, 2, 3});
  const Root root{{block_size, 0, ""}, 0, 0, 0};
  const std::vector<std::string> extras;
  thread_local std::vector<Key> keys;
  PromptKeys prompt(maker, root, tokens.view(), extras, keys);
  const size_t count = prompt.ready(tokens.view().length / block_size);
  return count == 0 ? 0 : prompt[count - 1];
}

void bind_index(nb::module_& module) {
  nb::class_<PyIndex> index(module, "Index");
  index
      .def(nb::init<nb::bytes, std::optional<uint64_t>, std::optional<uint64_t>, size_t>(),
           "secrets"_a, "max_blocks"_a.none(), "max_blocks_per_rank"_a.none(), "max_orphans"_a)
      .def("add", [](PyIndex& self) { return waiting_freely([&] { return self.index.add(); }); })
      .def("remove", [](PyIndex& self, uint32_t rank) {
        const GilReleased released;
        return self.index.remove(rank);
      })
      .def("clear", [](PyIndex& self, uint32_t rank) {
        const GilReleased released;
        return self.index.clear(rank);
      })
      .def("configure", &configure)
      .def("set_order", [](PyIndex& self, const std::vector<uint32_t>& ranks) {
        waiting_freely([&] { self.index.set_order(ranks); });
      })
      .def("apply", &apply, "rank"_a, "batch"_a.none())
      .def("match", [](nb::handle self, nb::handle token_ids, nb::handle recomputed) {
        Query query;
        return match_one(self, token_ids, recomputed, query);
      }, "token_ids"_a.none(), "recomputed"_a.none())
      .def("match_with", [](nb::handle self, nb::handle token_ids, nb::handle recomputed,
                            nb::bytes lora, nb::list extras, std::optional<nb::list> media,
                            std::optional<std::vector<uint32_t>> ranks, uint32_t block_size) {
        Query query = make_query(lora, extras, std::move(media), std::move(ranks), block_size);
        return match_one(self, token_ids, recomputed, query);
      }, "token_ids"_a.none(), "recomputed"_a.none(), "lora"_a, "extras"_a, "media"_a.none(),
         "ranks"_a.none(), "block_size"_a)
      .def("look", [](nb::handle self, nb::handle token_ids, nb::bytes lora, nb::list extras,
                      std::optional<nb::list> media, std::optional<std::vector<uint32_t>> ranks,
                      uint32_t block_size) {
        return look(self, token_ids,
                    make_query(lora, extras, std::move(media), std::move(ranks), block_size));
      }, "token_ids"_a, "lora"_a, "extras"_a, "media"_a.none(), "ranks"_a.none(), "block_size"_a)
      .def("salts", &salts)
      .def("__len__", [](const PyIndex& self) {
        return waiting_freely([&] { return self.index.size(); });
      })
      .def("size", [](const PyIndex& self, uint32_t rank) {
        return waiting_freely([&] { return self.index.size(rank); });
      })
      .def("statistics", &tree_statistics)
      .def("rank_statistics", &rank_statistics)
      .def("stored_text", [](const PyIndex& self) {
        const GilReleased released;
        return self.index.stored_text();
      })
      .def("block_sizes", [](const PyIndex& self, nb::bytes lora) {
        const std::string name = text(lora);
        return waiting_freely([&] { return self.index.block_sizes(name); });
      })
      .def("walk", &walk)
      .def("prefixes", &prefixes, "max_nodes"_a, "min_blocks"_a, "rows"_a, "only_rows"_a)
      .def("check", &check);
  bind_entries(index);
  bind_snapshots(index);
}

}  // namespace

}  // namespace kvindex

NB_MODULE(_native, module) {
  // A daemon thread that still waits when the interpreter ends keeps its objects: no news to users.
  nb::set_leak_warnings(false);
  module.doc() = "The native core of kvindex; use it through `kvindex.Index`.";
  module.attr("SECRET_BYTES") = kvindex::kSecretBytes;
  kvindex::bind_fingerprints(module);
  kvindex::bind_packed_batch(module);
  kvindex::bind_answer(module);
  kvindex::bind_index(module);
  kvindex::bind_queries(module);
  kvindex::bind_routing(module);
#ifdef __linux__
  kvindex::bind_intake(module);
  kvindex::bind_ring(module);
#endif
  module.def("floor_convert", &kvindex::floor_convert, "token_ids"_a);
  module.def("floor_hash", &kvindex::floor_hash, "token_ids"_a, "block_size"_a);
}
