#include "core/proofs.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/msgpack.hpp"

namespace kvindex {
namespace {

constexpr size_t kMostSteps = 1 << 17;
constexpr size_t kMostStepBytes = 1 << 26;
constexpr uint32_t kMostUnit = 8192;
constexpr size_t kMostSaltBytes = 255;
constexpr uint64_t kLooksAStep = 4;

// Pickles as Python writes them (protocol 5, one frame), of the few shapes that vLLM hashes.
class Pickle {
 public:
  Pickle() { bytes_.assign("\x80\x05\x95\0\0\0\0\0\0\0\0", kStart); }

  void none() { put('N'); }
  void bytes(std::string_view value) { sized('C', value); }
  void text(std::string_view value) { sized('\x8c', value); }
  void tokens(const uint32_t* tokens, size_t count) {
    if (count > 3) put('(');
    for (size_t i = 0; i < count; ++i) number(tokens[i]);
    count > 3 ? memoize('t') : tuple(count);
  }
  // Of the last values, 1 to 3.
  void tuple(size_t count) { memoize(static_cast<char>('\x85' + static_cast<char>(count - 1))); }
  Sha256 hash() {
    put('.');
    uint64_t length = bytes_.size() - kStart;
    for (size_t i = 0; i < 8; ++i, length >>= 8) bytes_[3 + i] = static_cast<char>(length);
    return sha256(bytes_);
  }

 private:
  static constexpr size_t kStart = 11;  // bytes before the frame's content

  void put(char byte) { bytes_.push_back(byte); }
  void memoize(char code) {
    put(code);
    put('\x94');
  }
  void sized(char code, std::string_view value) {
    put(code);
    put(static_cast<char>(value.size()));
    bytes_ += value;
    put('\x94');
  }
  void number(uint32_t value) {
    const int length = value <= 0xff ? 1 : value <= 0xffff ? 2 : 4;
    put(length == 1 ? 'K' : length == 2 ? 'M' : 'J');
    for (int i = 0; i < length; ++i) put(static_cast<char>(value >> (8 * i)));
  }

  std::string bytes_;
};

Sha256 root_hash() {
  Pickle pickle;
  pickle.text("vllm-none-hash");
  return pickle.hash();
}

std::string_view view(const Sha256& hash) {
  return {reinterpret_cast<const char*>(hash.data()), hash.size()};
}

bool names(const Batch& batch, const WireHash& label, const Proofs::Step& step) {
  return label.is_bytes() ? batch.text(label) == step.text() : label.value == step.key();
}

// The first extra key of a prompt's start, which is its salt.
struct Salt {
  bool given = false;
  std::string_view text;
};

// Whether all that an event's labels cover is known, besides the chain before; and the salt.
bool is_plain(const Batch& batch, const Event& event, uint32_t unit, Salt& salt) {
  if (unit > kMostUnit || event.lora.length != 0 || event.lookahead != 0 || event.wide_tokens ||
      (event.has_salt && !event.has_parent)) {
    return false;
  }
  const uint32_t* const tokens = batch.tokens.data() + event.tokens_begin;
  if (std::any_of(tokens, tokens + event.tokens_count,
                  [](uint32_t token) { return token >> 31 != 0; })) {
    return false;
  }
  if (!event.has_extra_keys) return true;
  for (uint32_t i = 0; i < event.extras_count; ++i) {
    const std::string_view extra = batch.text(batch.extras[event.extras_begin + i]);
    if (extra.empty()) continue;
    const auto* const begin = reinterpret_cast<const uint8_t*>(extra.data());
    Reader in(begin, begin + extra.size());
    std::string_view text;
    // Of blocks that are not named, extra keys are unknown.
    if (i != 0 || event.has_parent || !in.next_is_text() || !in.read_raw_text(text) ||
        in.at() != in.end() || text.size() > kMostSaltBytes) {
      return false;
    }
    salt = {true, text};
  }
  return true;
}

}  // namespace

void Proofs::clear() {
  found_.clear();
  kept_.clear();
}

std::optional<uint64_t> Proofs::key(const Batch& batch, const WireHash& label) {
  if (!label.is_bytes()) return label.value;
  const std::string_view text = batch.text(label);
  if (text.size() != sizeof(Sha256)) return std::nullopt;
  return load_big_endian<uint64_t>(reinterpret_cast<const uint8_t*>(text.data()) + 24);
}

bool Proofs::chain(const Batch& batch, const Event& event, uint32_t unit,
                   std::vector<Step>& steps, Hold& hold) {
  static const Sha256 root = root_hash();
  std::optional<uint64_t> parent;
  Sha256 hash = root;
  if (event.has_parent) {
    parent = key(batch, event.parent);
    const auto before = parent ? found_.find(Label{*parent, false}) : found_.end();
    if (before == found_.end() || !names(batch, event.parent, before->second->second)) return false;
    hash = before->second->second.hash;
    kept_.splice(kept_.end(), kept_, before->second);
  }
  Salt salt;
  if (!is_plain(batch, event, unit, salt)) return false;
  const uint32_t* const tokens = batch.tokens.data() + event.tokens_begin;
  for (uint32_t start = 0; start < event.tokens_count; start += unit) {
    Pickle pickle;
    pickle.bytes(view(hash));
    pickle.tokens(tokens + start, unit);
    if (salt.given) {
      pickle.text("cache_salt");
      pickle.text(salt.text);
      pickle.tuple(2);
      pickle.tuple(1);
    } else {
      pickle.none();
    }
    pickle.tuple(3);
    hash = pickle.hash();
    steps.push_back({hash, parent, {}, salt.given});
    parent = steps.back().key();
    salt = {};
    hold.did(1 + unit / Hold::kTokens);
  }
  looks_ = std::min(looks_ + kLooksAStep * steps.size(), kLooks);
  return true;
}

bool Proofs::find(const Batch& batch, const Event& event, const std::vector<Step>& steps,
                  size_t scale, std::vector<size_t>& places) {
  size_t place = 0;
  for (uint32_t i = 0; i < event.hashes_count; ++i, ++place) {
    const WireHash& label = batch.hashes[event.hashes_begin + i];
    while (place < steps.size() / scale &&
           !names(batch, label, steps[(place + 1) * scale - 1])) {
      ++place;
    }
    if (place == steps.size() / scale) return false;
    places.push_back(place);
  }
  return true;
}

void Proofs::keep(const std::vector<Step>& steps, uint32_t unit) {
  const size_t most = std::min(kMostSteps, kMostStepBytes / (8 * size_t{unit}));
  for (const Step& step : steps) {
    const auto [place, is_new] = found_.try_emplace(Label{step.key(), false});
    if (is_new) {
      kept_.emplace_back(step.key(), step);
      place->second = std::prev(kept_.end());
    } else {
      place->second->second = step;
      kept_.splice(kept_.end(), kept_, place->second);
    }
    if (kept_.size() <= most) continue;
    found_.erase(Label{kept_.front().first, false});
    kept_.pop_front();
  }
}

const Proofs::Step* Proofs::look(uint64_t key) {
  if (looks_ == 0) return nullptr;
  --looks_;
  const auto found = found_.find(Label{key, false});
  return found == found_.end() ? nullptr : &found->second->second;
}

}  // namespace kvindex
