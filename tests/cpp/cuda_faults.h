// Faults that can be planted into the emulated kernels, to see that the tests find them: RINGCOMM_FAULT=6 in the
// environment plants number 6. Included before everything else in builds with tests of the emulated engine, and only
// there: elsewhere RINGCOMM_FAULT is the constant 0 and the compiler drops every switch.
#pragma once

#include <cstdlib>

namespace ringcomm::test {

inline const int planted_fault = [] {
  const char* const number = std::getenv("RINGCOMM_FAULT");
  return number ? std::atoi(number) : 0;
}();

}  // namespace ringcomm::test

#define RINGCOMM_FAULT ::ringcomm::test::planted_fault
