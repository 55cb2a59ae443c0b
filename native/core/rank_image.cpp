#include "core/rank_image.hpp"

#include <algorithm>
#include <bit>
#include <set>

#include "core/rank_blocks.hpp"
#include "core/utf8.hpp"

namespace kvindex {

namespace {

constexpr size_t kMostLoraDigits = 640;  // of a LoRA's number: Python reads that many, however it is set

void require(bool truth, const char* what) {
  if (!truth) throw ImageError(std::string("the section says what cannot be: ") + what);
}

// Whether this is a LoRA's native name: none, "s" and its name, or "i" and its number.
bool is_lora(std::string_view tag) {
  if (tag.empty()) return true;
  const std::string_view name = tag.substr(1);
  if (tag[0] == 's') return !name.empty() && is_utf8_or_surrogates(name);
  const std::string_view digits = name.substr(name.starts_with('-') ? 1 : 0);
  return tag[0] == 'i' && !digits.empty() && digits.size() <= kMostLoraDigits && digits[0] != '0' &&
         digits.find_first_not_of("0123456789") == std::string_view::npos;
}

// Whether no two of some things are equal; changes their order.
template <class Some>
bool distinct(std::vector<Some> all) {
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

class ImageCheck {
 public:
  explicit ImageCheck(const RankImage& image) : image_(image) {}

  void run() const {
    names();
    chains();
    heads();
    further_labels();
    odd_copies();
    ambiguous_labels();
    orphans();
    learned();
  }

 private:
  void names() const {
    require(image_.shapes.size() <= RankGroups::kMostShapes && distinct(image_.shapes),
            "too many shapes of blocks, or one twice");
    for (const auto& [block_size, lookahead] : image_.shapes) {
      require(block_size != 0, "blocks of no size");
    }
    require(distinct(image_.roots), "a namespace twice");
    for (const Namespace& root : image_.roots) {
      const std::pair shape{root.block_size, root.lookahead};
      require(std::find(image_.shapes.begin(), image_.shapes.end(), shape) != image_.shapes.end(),
              "a namespace of an unknown shape");
      require(is_lora(root.lora), "a LoRA without a name");
    }
    require(image_.places.size() <= RankBlocks::kMostPlaces, "too many places");
    for (size_t i = 0; i < image_.places.size(); ++i) {
      require(std::count(image_.places.begin(), image_.places.end(), image_.places[i]) == 1,
              "a place twice");
      require(is_utf8_or_surrogates(image_.places[i].medium), "a medium that is no text");
      require(image_.places[i].chunk == 0 || medium_tier(image_.places[i].medium) != kDeviceTier,
              "a chunk on the device");
    }
  }

  void chains() const {
    std::vector<bool> needed(image_.chains.size());
    uint32_t holding = 0;
    for (uint32_t i = 0; i < image_.chains.size(); ++i) {
      const ChainImage& chain = image_.chains[i];
      if (chain.parent != ChainImage::kStart) {
        const ChainImage& parent = image_.chains[chain.parent];
        if (chain.offset + 1 == parent.count) needed[chain.parent] = true;
      }
      uint64_t held = 0;
      uint64_t places = 0;
      for (; holding < chain.holdings_end; ++holding) {
        const HoldingImage& some = image_.holdings[holding];
        require((places >> some.place & 1) == 0, "a chain twice in one place");
        places |= uint64_t{1} << some.place;
        held |= some.blocks;
      }
      if ((held >> (chain.count - 1) & 1) != 0) needed[i] = true;
    }
    require(std::find(needed.begin(), needed.end(), false) == needed.end(),
            "a chain that nobody needs");
  }

  // No block is in an image twice: else what is held of it would be counted twice.
  void heads() const {
    std::vector<std::pair<uint64_t, Key>> heads;
    heads.reserve(image_.chains.size());
    for (const ChainImage& chain : image_.chains) {
      const Key key = image_.keys[chain.first];
      if (chain.parent == ChainImage::kStart) {
        heads.emplace_back((uint64_t{1} << 32) + chain.root, key);
        continue;
      }
      const uint32_t before = image_.position(chain);
      heads.emplace_back(before, key);
      const bool goes_on = chain.offset + 1 < image_.chains[chain.parent].count;
      require(!goes_on || image_.keys[before + 1] != key, "a block twice");
    }
    require(distinct(std::move(heads)), "a block twice");
  }

  void further_labels() const {
    std::set<std::pair<uint32_t, std::string>> known;
    for (const FurtherImage& some : image_.further) {
      const uint64_t places = image_.places_of(some.position);
      require(places != 0 && (places_in(some.copies) & ~places) == 0,
              "copies where a block is not held");
      require(!image_.same(some.label, image_.labels[some.position]) &&
                  known.emplace(some.position, key(some.label)).second,
              "a block's label twice");
    }
  }

  void odd_copies() const {
    std::map<uint32_t, uint64_t> further;
    for (const FurtherImage& some : image_.further) {
      further[some.position] |= places_in(some.copies);
    }
    std::set<uint32_t> known;
    for (const OddImage& some : image_.odd) {
      require(known.insert(some.position).second, "a block's copies twice");
      const uint64_t places = image_.places_of(some.position);
      const auto others = further.find(some.position);
      const uint64_t rest = others == further.end() ? 0 : others->second;
      const uint64_t listed = places_in(some.copies) | rest;
      require(places != 0 && listed == places, "copies where a block is not held");
    }
  }

  void ambiguous_labels() const {
    std::set<std::pair<uint32_t, std::string>> further;
    for (const FurtherImage& some : image_.further) further.emplace(some.position, key(some.label));
    for (const AmbiguousImage& some : image_.ambiguous) {
      require(distinct(some.positions), "a label's block twice");
      for (const uint32_t position : some.positions) {
        require(image_.same(some.label, image_.labels[position]) ||
                    further.contains({position, key(some.label)}),
                "a block without its label");
      }
    }
  }

  void orphans() const {
    std::vector<std::string> labels;
    for (const OrphanImage& orphan : image_.orphans) labels.push_back(key(orphan.label));
    require(distinct(std::move(labels)), "an orphan twice");
    std::vector<bool> waits(image_.orphans.size());
    for (const WaitImage& wait : image_.waits) {
      require(!waits[wait.orphan], "an orphan that waits twice");
      waits[wait.orphan] = true;
    }
  }

  void learned() const {
    for (const auto& [group_idx, group] : image_.groups) {
      require(is_utf8_or_surrogates(group.spec.kind), "a kind that is no text");
      require(group.spec.valid(), "a group without its window");
      require(group.block_size == 0 || image_.unit != 0, "blocks without a unit");
      require(group.kind_known || !group.configured, "a kind from nowhere");
      require(image_.unit == 0 || group.block_size % image_.unit == 0, "blocks of no whole units");
    }
    for (const auto& [tag, count] : image_.skipped) {
      require(is_utf8_or_surrogates(tag), "a tag that is no text");
    }
    require(image_.skipped.size() <= RankBlocks::kMostTags + 1, "too many tags");
    require(image_.torn.size() <= RankBlocks::kMostTorn, "too many torn labels");
    require(image_.counters.size() == static_cast<size_t>(Counter::kCount) &&
                image_.ignored.size() == static_cast<size_t>(Ignored::kCount),
            "counters of another release");
  }

  // The same for equal labels only.
  std::string key(const WireHash& label) const {
    if (!label.is_bytes()) return std::to_string(label.value);
    std::string made(1, 'b');
    return made.append(image_.name(label));
  }

  const RankImage& image_;
};

}  // namespace

uint64_t RankImage::places_of(uint32_t position) const {
  const auto after = std::upper_bound(
      chains.begin(), chains.end(), position,
      [](uint32_t value, const ChainImage& chain) { return value < chain.first; });
  const ChainImage& chain = *(after - 1);
  uint32_t holding = after - 1 == chains.begin() ? 0 : (after - 2)->holdings_end;
  uint64_t all = 0;
  for (; holding < chain.holdings_end; ++holding) {
    const HoldingImage& some = holdings[holding];
    if ((some.blocks >> (position - chain.first) & 1) != 0) all |= uint64_t{1} << some.place;
  }
  return all;
}

uint64_t RankImage::groups_in(uint64_t some) const {
  if ((some & (some - 1)) == 0) return some != 0;
  uint64_t count = 0;
  for (size_t place = 0; place < places.size(); ++place) {
    if ((some >> place & 1) == 0) continue;
    bool is_new = true;
    for (size_t other = 0; other < place; ++other) {
      if ((some >> other & 1) != 0 && places[other].group_idx == places[place].group_idx) {
        is_new = false;
      }
    }
    count += is_new;
  }
  return count;
}

uint64_t RankImage::resident() const {
  uint64_t count = 0;
  uint32_t holding = 0;
  for (const ChainImage& chain : chains) {
    if (chain.holdings_end - holding == 1) {
      count += static_cast<uint64_t>(std::popcount(holdings[holding].blocks));
    } else if (holding != chain.holdings_end) {
      for (uint32_t i = 0; i < chain.count; ++i) count += groups_in(places_of(chain.first + i));
    }
    holding = chain.holdings_end;
  }
  for (const OddImage& some : odd) {
    count += groups_in(places_in(some.copies)) - groups_in(places_of(some.position));
  }
  for (const FurtherImage& some : further) count += groups_in(places_in(some.copies));
  return count;
}

void RankImage::check() const { ImageCheck(*this).run(); }

}  // namespace kvindex
