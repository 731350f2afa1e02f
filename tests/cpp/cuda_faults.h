// Faults that can be planted into the emulated engine, to see that the tests find them: RINGCOMM_FAULT=6 in the
// environment plants number 6. Included before everything else in builds with the emulated engine, and only there:
// elsewhere RINGCOMM_FAULT is the constant 0 and the compiler drops every switch.
//
// tests/test_native.py runs each in the build that finds it: by wrong values, by the order of accesses
// (ThreadSanitizer), by accesses outside of memory (AddressSanitizer).
//
//   number  found by  test                    fault
//        1  order     cuda_back_to_back_test  a flag is stored without a release
//        2  values    cuda_ring_test          no barrier between the data of a block and its flag
//        3  values    cuda_ring_test          no barrier between a wait and the data of the block
//        4  memory    cuda_ring_test          a chunk lands in the place of another
//        5  values    cuda_ring_test          nobody waits for credit
//        6  order     cuda_back_to_back_test  a flag is read without an acquire
//        7  values    cuda_ring_test          the tickets of a link are forgotten between launches
//        8  values    cuda_ring_test          credit is off by one slot
//        9  memory    cuda_copy_test          the tail of a run is rounded up to 16 bytes
//       10  values    cuda_direct_test        a meet waits for nobody
//       11  values    cuda_oneshot_test       the second flag of an LL line is not looked at
//       12  values    cuda_ring_test          credit is given before the block has read
//       13  values    cuda_oneshot_test       the flag of an LL128 line is not looked at
//       15  values    cuda_direct_test        the staging regions do not take turns
//       16  values    cuda_ring_test          signatures are not compared
//       17  values    cuda_direct_test        no barrier before a meet
//       18  order     cuda_back_to_back_test  no barrier before the counters of a channel move on
//       19  values    cuda_direct_test        nobody meets before the results are taken home
//       20  values    cuda_back_to_back_test  the boxes for packets do not take turns
//       21  values    cuda_buffers_test       a peer's mapping is used after the memory was freed
//       22  values    cuda_copy_test          the source of a long message is released before it is read
//       23  values    cuda_direct_test        the regions for reduced shards do not take turns
//       24  values    cuda_copy_engine_test   a stream copies before its peers' inputs are ready
//       25  values    cuda_copy_engine_test   a stream goes on before its peers have copied
#pragma once

#include <cstdlib>

namespace ringcomm::test {

inline const int planted_fault = [] {
  const char* const number = std::getenv("RINGCOMM_FAULT");
  return number ? std::atoi(number) : 0;
}();

}  // namespace ringcomm::test

#define RINGCOMM_FAULT ::ringcomm::test::planted_fault
