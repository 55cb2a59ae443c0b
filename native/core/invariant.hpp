// What `check()` throws when an invariant does not hold: a bug in kvindex.
#pragma once

#include <stdexcept>
#include <string>

namespace kvindex {

class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool truth, const std::string& message) {
  if (!truth) throw InvariantError(message);
}

}  // namespace kvindex
