#include "core/entry_reader.hpp"

#include "core/msgpack.hpp"

namespace kvindex {

namespace {

std::string_view span(const uint8_t* begin, const uint8_t* end) {
  return {reinterpret_cast<const char*>(begin), static_cast<size_t>(end - begin)};
}

bool read_name(Reader& in, std::string_view wanted) {
  std::string_view name;
  return in.read_raw_text(name) && name == wanted;
}

// Read what follows the type of a batch, in the order in which it is encoded.
bool read_batch_entry(Reader in, Entry& entry) {
  if (!read_name(in, "rank")) return false;
  const uint8_t* const begin = in.at();
  if (!in.skip()) return false;
  entry.rank = span(begin, in.at());
  return read_name(in, "payload") && in.read_bin(entry.payload);
}

bool read_entry(Reader& in, Entry& entry) {
  const uint8_t* const begin = in.at();
  Reader inside = in;
  if (!in.skip()) return false;
  entry.whole = span(begin, in.at());
  uint32_t fields = 0;
  std::string_view type;
  if (inside.read_map(fields) && read_name(inside, "type") && inside.read_raw_text(type)) {
    if (type == "StatusChanged") entry.kind = Entry::Kind::status;
    if (type == "BatchApplied" && fields == 3 && read_batch_entry(inside, entry)) {
      entry.kind = Entry::Kind::batch;
    }
  }
  return true;
}

}  // namespace

bool read_entries(const uint8_t* data, size_t size, std::vector<Entry>& entries) {
  Reader in(data, data + size);
  uint32_t count = 0;
  if (!in.read_array(count)) return false;
  entries.clear();
  for (; count > 0; --count) {
    if (!read_entry(in, entries.emplace_back())) return false;
  }
  return in.left() == 0;
}

}  // namespace kvindex
