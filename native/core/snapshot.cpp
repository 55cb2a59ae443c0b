#include "core/snapshot.hpp"

#include <bit>
#include <cstring>
#include <limits>
#include <string_view>

#include "core/rank_blocks.hpp"

namespace kvindex {

namespace {

constexpr uint64_t kWhole = 1;  // a holding: the whole chain

uint64_t little_endian(uint64_t value) {
  return std::endian::native == std::endian::little ? value : __builtin_bswap64(value);
}

uint64_t all_of(uint32_t blocks) { return ~uint64_t{0} >> (kStrandBlocks - blocks); }

// Writing ------------------------------------------------------------------------------------

class ImageWriter {
 public:
  explicit ImageWriter(const RankImage& image) : image_(image) {
    bytes_.reserve(image.keys.size() * 18 + image.text.size() + image.chains.size() * 8 + 4096);
  }

  std::string run() {
    number(image_.shapes.size());
    for (const auto& [block_size, lookahead] : image_.shapes) {
      number(block_size);
      number(lookahead);
    }
    number(image_.roots.size());
    for (const Namespace& root : image_.roots) {
      number(root.block_size);
      number(root.lookahead);
      text(root.lora);
    }
    number(image_.places.size());
    for (const PlaceImage& place : image_.places) {
      number(place.group_idx);
      text(place.medium);
      number(place.chunk);
    }
    chains();
    number(image_.odd.size());
    for (const OddImage& some : image_.odd) {
      number(some.position);
      copies(some.copies);
    }
    number(image_.further.size());
    for (const FurtherImage& some : image_.further) {
      number(some.position);
      label(some.label);
      copies(some.copies);
    }
    number(image_.ambiguous.size());
    for (const AmbiguousImage& some : image_.ambiguous) {
      label(some.label);
      number(some.positions.size());
      for (const uint32_t position : some.positions) number(position);
    }
    orphans();
    learned();
    return std::move(bytes_);
  }

 private:
  void chains() {
    number(image_.chains.size());
    uint32_t holding = 0;
    for (uint32_t i = 0; i < image_.chains.size(); ++i) {
      const ChainImage& chain = image_.chains[i];
      const bool starts = chain.parent == ChainImage::kStart;
      number(starts ? 0 : i - chain.parent);
      number(starts ? 2 * uint64_t{chain.root} + (chain.salted ? 1 : 0) : chain.offset);
      number(chain.count);
      number(chain.holdings_end - holding);
      uint64_t held = 0;
      for (; holding < chain.holdings_end; ++holding) {
        const HoldingImage& some = image_.holdings[holding];
        const bool whole = some.blocks == all_of(chain.count);
        number(uint64_t{some.place} << 1 | (whole ? kWhole : 0));
        if (!whole) word(some.blocks);
        held |= some.blocks;
      }
      for (uint32_t k = 0; k < chain.count; ++k) word(image_.keys[chain.first + k]);
      for (; held != 0; held &= held - 1) {
        label(image_.labels[chain.first + static_cast<uint32_t>(std::countr_zero(held))]);
      }
    }
  }

  void copies(const std::vector<CopiesImage>& all) {
    number(all.size());
    for (const CopiesImage& some : all) {
      number(some.place);
      number(some.count);
    }
  }

  void orphans() {
    number(image_.orphans.size());
    for (const OrphanImage& orphan : image_.orphans) {
      label(orphan.label);
      copies(orphan.copies);
    }
    number(image_.waits.size());
    for (const WaitImage& wait : image_.waits) {
      number(wait.orphan);
      label(wait.parent);
      number(wait.root);
      word(wait.content.low);
      word(wait.content.high);
      number(wait.content_bytes);
    }
    number(image_.orphans_dropped);
  }

  void learned() {
    number(image_.groups.size());
    for (const auto& [group_idx, group] : image_.groups) {
      number(group_idx);
      number(group.block_size);
      number((group.configured ? 1u : 0u) | (group.kind_known ? 2u : 0u) |
             (group.spec.sliding_window ? 4u : 0u) | (group.spec.attention_chunk_size ? 8u : 0u) |
             (group.size_off_device ? 16u : 0u));
      word(static_cast<uint64_t>(group.spec.sliding_window.value_or(0)));
      word(static_cast<uint64_t>(group.spec.attention_chunk_size.value_or(0)));
      text(group.spec.kind);
    }
    number(image_.torn.size());
    for (const WireHash& torn : image_.torn) label(torn);
    number(image_.skipped.size());
    for (const auto& [tag, count] : image_.skipped) {
      text(tag);
      number(count);
    }
    for (const auto* counts : {&image_.counters, &image_.ignored}) {
      number(counts->size());
      for (const uint64_t count : *counts) number(count);
    }
    number(image_.ambiguous_count);
    number(image_.duplicates);
    number(image_.unit);
    number(image_.settings.hash_block_size);
    number(image_.settings.offload_chunk);
    number(image_.settings.eagle_groups.size());
    for (const uint32_t group_idx : image_.settings.eagle_groups) number(group_idx);
    number((image_.settings.reports_full ? 1u : 0u) | (image_.positions_unknown ? 2u : 0u) |
           (image_.settings.eagle ? 4u : 0u) | (image_.settings.upper_bound ? 8u : 0u) |
           (image_.settings.resets_connector ? 16u : 0u) |
           (image_.orphans_forgotten ? 32u : 0u) | (image_.left_out ? 64u : 0u) |
           (image_.removals_unknown ? 128u : 0u) | (image_.settings.removes_last ? 256u : 0u));
  }

  // An int of up to 64 bits, 7 to a byte, the lowest first; all but the last byte have the high bit.
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  void word(uint64_t value) {
    value = little_endian(value);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.append(value);
  }
  void label(const WireHash& value) {
    if (value.is_bytes()) return text(image_.name(value));
    number(0);
    word(value.value);
  }

  const RankImage& image_;
  std::string bytes_;
};

// Reading ------------------------------------------------------------------------------------

class ImageReader {
 public:
  ImageReader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  RankImage run() {
    repeat([&] {
      const uint32_t block_size = small();
      image_.shapes.emplace_back(block_size, small());
    });
    repeat([&] {
      Namespace root;
      root.block_size = small();
      root.lookahead = small();
      root.lora = text();
      image_.roots.push_back(std::move(root));
    });
    repeat([&] {
      PlaceImage place;
      place.group_idx = small();
      place.medium = text();
      place.chunk = small();
      image_.places.push_back(std::move(place));
    });
    require(image_.places.size() <= RankBlocks::kMostPlaces);
    chains();
    repeat([&] {
      const uint32_t position = below(image_.keys.size());
      image_.odd.push_back({position, copies()});
    });
    repeat([&] {
      FurtherImage some{below(image_.keys.size()), label(), {}};
      some.copies = copies();
      image_.further.push_back(std::move(some));
    });
    repeat([&] {
      AmbiguousImage some{label(), {}};
      repeat([&] { some.positions.push_back(below(image_.keys.size())); });
      image_.ambiguous.push_back(std::move(some));
    });
    orphans();
    learned();
    require(at_ == end_);
    image_.check();
    return std::move(image_);
  }

 private:
  void chains() {
    const uint64_t count = number();
    require(count <= left());  // so many bytes at least
    image_.chains.reserve(count);
    image_.keys.reserve(left() / 17);
    image_.labels.reserve(left() / 17);
    for (uint32_t i = 0; i < count; ++i) chain(i);
  }

  void chain(uint32_t number_of_it) {
    ChainImage chain;
    const uint32_t back = below(uint64_t{number_of_it} + 1);
    if (back == 0) {
      const uint32_t start = below(2 * image_.roots.size());
      chain.root = start / 2;
      chain.salted = start % 2 != 0;
    } else {
      chain.parent = number_of_it - back;
      chain.offset = below(image_.chains[chain.parent].count);
      chain.root = image_.chains[chain.parent].root;
    }
    chain.first = image_.positions();
    chain.count = small();
    require(chain.count != 0 && chain.count <= kStrandBlocks);
    uint64_t held = 0;
    for (uint32_t holdings = below(image_.places.size() + 1); holdings != 0; --holdings) {
      held |= holding(chain.count);
    }
    chain.holdings_end = static_cast<uint32_t>(image_.holdings.size());
    require(chain.count <= left() / 8);
    for (uint32_t k = 0; k < chain.count; ++k) image_.keys.push_back(word());
    require(image_.keys.size() < std::numeric_limits<uint32_t>::max());
    for (uint32_t k = 0; k < chain.count; ++k) {
      image_.labels.push_back((held >> k & 1) != 0 ? label() : RankImage::kUnlabelled);
    }
    image_.chains.push_back(chain);
  }

  uint64_t holding(uint32_t blocks) {
    const uint32_t entry = below(image_.places.size() * 2);
    const uint64_t held = (entry & kWhole) != 0 ? all_of(blocks) : word();
    require(held != 0 && (held & ~all_of(blocks)) == 0);
    image_.holdings.push_back({entry >> 1, held});
    return held;
  }

  std::vector<CopiesImage> copies() {
    std::vector<CopiesImage> all;
    uint64_t places = 0;
    repeat([&] {
      const uint32_t place = below(image_.places.size());
      const uint64_t count = number();
      require((places >> place & 1) == 0 && count != 0);
      places |= uint64_t{1} << place;
      all.push_back({place, count});
    });
    require(!all.empty());
    return all;
  }

  void orphans() {
    repeat([&] {
      OrphanImage orphan{label(), {}};
      orphan.copies = copies();
      image_.orphans.push_back(std::move(orphan));
    });
    repeat([&] {
      WaitImage wait;
      wait.orphan = below(image_.orphans.size());
      wait.parent = label();
      wait.root = below(image_.roots.size());
      wait.content.low = word();
      wait.content.high = word();
      wait.content_bytes = number();
      require(wait.content_bytes >> 40 == 0);  // sums of them are not to overflow
      image_.waits.push_back(wait);
    });
    image_.orphans_dropped = number();
  }

  void learned() {
    repeat([&] {
      const uint32_t group_idx = small();
      Group group;
      group.block_size = small();
      const uint32_t flags = below(32);
      const auto window = static_cast<int64_t>(word());
      const auto chunk = static_cast<int64_t>(word());
      group.configured = (flags & 1) != 0;
      group.kind_known = (flags & 2) != 0;
      if ((flags & 4) != 0) group.spec.sliding_window = window;
      if ((flags & 8) != 0) group.spec.attention_chunk_size = chunk;
      group.size_off_device = (flags & 16) != 0;
      group.spec.kind = text();
      if (group.configured) image_.settings.groups[group_idx] = group.spec;
      require(image_.groups.emplace(group_idx, std::move(group)).second);
    });
    repeat([&] { image_.torn.push_back(label()); });
    repeat([&] {
      std::string tag(text());
      const uint64_t count = number();
      require(image_.skipped.emplace(std::move(tag), count).second);
    });
    for (auto* counts : {&image_.counters, &image_.ignored}) {
      repeat([&] { counts->push_back(number()); });
    }
    image_.ambiguous_count = number();
    image_.duplicates = number();
    image_.unit = small();
    image_.settings.hash_block_size = small();
    image_.settings.offload_chunk = small();
    repeat([&] { image_.settings.eagle_groups.insert(small()); });
    const uint32_t flags = below(512);
    image_.settings.reports_full = (flags & 1) != 0;
    image_.positions_unknown = (flags & 2) != 0;
    image_.settings.eagle = (flags & 4) != 0;
    image_.settings.upper_bound = (flags & 8) != 0;
    image_.settings.resets_connector = (flags & 16) != 0;
    image_.orphans_forgotten = (flags & 32) != 0;
    image_.left_out = (flags & 64) != 0;
    image_.removals_unknown = (flags & 128) != 0;
    image_.settings.removes_last = (flags & 256) != 0;
  }

  // Read a count, and so many things of at least one byte.
  template <class Read>
  void repeat(Read&& read) {
    for (uint64_t count = number(); count != 0; --count) read();
  }

  uint64_t number() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      require(at_ != end_);
      const uint8_t byte = *at_++;
      require(shift != 63 || byte <= 1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    throw ImageError("the section has a number of more than 64 bits");
  }
  uint32_t small() { return below(uint64_t{1} << 32); }
  uint32_t below(uint64_t bound) {
    const uint64_t value = number();
    require(value < bound);
    return static_cast<uint32_t>(value);
  }
  uint64_t word() {
    uint64_t value;
    require(left() >= sizeof value);
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return little_endian(value);
  }
  std::string_view text() {
    const uint64_t length = number();
    require(length <= left());
    const std::string_view found(reinterpret_cast<const char*>(at_), length);
    at_ += length;
    return found;
  }
  WireHash label() {
    const std::string_view name = text();
    if (name.empty()) return {word(), 0};
    require(name.size() < RankImage::kUnlabelled.length);
    const WireHash made{image_.text.size(), static_cast<uint32_t>(name.size())};
    image_.text += name;
    return made;
  }
  uint64_t left() const { return static_cast<uint64_t>(end_ - at_); }

  static void require(bool truth) {
    if (!truth) throw ImageError("the section says what cannot be, or ends too early");
  }

  const uint8_t* at_;
  const uint8_t* const end_;
  RankImage image_;
};

}  // namespace

std::string write_image(const RankImage& image) { return ImageWriter(image).run(); }

RankImage read_image(const uint8_t* data, size_t size) { return ImageReader(data, size).run(); }

}  // namespace kvindex
