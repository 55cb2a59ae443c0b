// 128-bit products: GCC and clang have them on every 64-bit machine, ISO C++ has not.
#pragma once

namespace kvindex {

__extension__ using uint128_t = unsigned __int128;

}  // namespace kvindex
