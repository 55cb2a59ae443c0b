#include "core/owners.hpp"

#include <algorithm>
#include <array>

#include "core/engine_hit.hpp"

namespace kvindex {

namespace {

constexpr std::array<std::string_view, 8> kDevices{"GPU", "CUDA", "ROCM", "HIP",
                                                   "XPU", "NPU",  "TPU",  "HPU"};
constexpr std::array<std::string_view, 2> kHost{"CPU", "CPU_PINNED"};
constexpr std::array<std::string_view, 3> kSglang{"CPU_PINNED", "DISK", "EXTERNAL"};
constexpr std::array<std::string_view, 5> kStorage{"DISK", "EXTERNAL", "STORAGE", "FS", "OBJ"};

constexpr char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

bool begins_with(std::string_view text, std::string_view upper_case) {
  return text.size() >= upper_case.size() &&
         std::equal(upper_case.begin(), upper_case.end(), text.begin(),
                    [](char wanted, char c) { return wanted == upper(c); });
}

}  // namespace

uint8_t medium_tier(std::string_view folded_medium) {
  const auto is = [&](std::string_view name) { return folded_medium == name; };
  const auto begins = [&](std::string_view name) { return begins_with(folded_medium, name); };
  if (std::any_of(kDevices.begin(), kDevices.end(), begins)) return 0;
  if (std::any_of(kHost.begin(), kHost.end(), is)) return 1;
  return std::any_of(kStorage.begin(), kStorage.end(), is) ? 2 : 3;
}

bool outlives_clear(std::string_view folded_medium, bool resets_connector) {
  const auto is = [&](std::string_view name) { return folded_medium == name; };
  if (std::any_of(kSglang.begin(), kSglang.end(), is)) return false;
  return medium_tier(folded_medium) > (resets_connector ? kHostTier : kDeviceTier);
}

}  // namespace kvindex
