// The messages of a call as runs of elements that go through the staging areas.
#pragma once

#include "cuda/device/move.h"

namespace ringcomm::cuda {

// The messages of a call as one run of elements per column: message after message, each beginning on a whole line. A
// reduce_scatter has a column for every rank, the others have one.
class StagingLayout {
 public:
  RINGCOMM_DEVICE StagingLayout(const CallArgs& args, int rank, u64 element)
      : args_(args), rank_(rank), element_(element), align_(kLineBytes / element_) {}

  RINGCOMM_DEVICE bool scatters() const { return args_.op == Op::kReduceScatter; }
  RINGCOMM_DEVICE u64 align() const { return align_; }
  // Elements of the longest column.
  RINGCOMM_DEVICE u64 length() const {
    u64 all = 0;
    for (int m = 0; m < args_.num_messages; ++m) {
      const u64 count = whole_lines(args_.counts[m]);
      all = args_.parts ? larger(all, count) : all + count;
    }
    return all;
  }
  // Calls each(message, first element in the message, first byte in the run, elements) for every part of `run` in a
  // column.
  template <typename Each>
  RINGCOMM_DEVICE void visit(int column, const Slice& run, const Each& each) const {
    u64 begin = 0;
    for (int m = 0; m < args_.num_messages && begin < run.offset + run.count; ++m) {
      if (args_.parts && m != column) continue;
      const u64 count = args_.counts[m], end = begin + count;
      const u64 from = larger(begin, run.offset), to = smaller(end, run.offset + run.count);
      if (from < to) each(m, from - begin, (from - run.offset) * element_, to - from);
      begin += whole_lines(count);
    }
  }
  // Copies to the staging area.
  RINGCOMM_DEVICE void stage(const Block& block, int column, const Slice& run, char* to) const {
    visit(column, run, [&](int m, u64 at, u64 offset, u64 count) {
      const u64 before = scatters() && !args_.parts ? column * args_.counts[m] : 0;
      const char* from = static_cast<const char*>(args_.buffers(m, blockIdx.y).input);
      copy_run(block, from + (before + at) * element_, count * element_, to + offset);
    });
  }
  // Copies from a staging area to the outputs.
  RINGCOMM_DEVICE void copy_out(const Block& block, const Slice& run, const char* from) const {
    visit(rank_, run, [&](int m, u64 at, u64 offset, u64 count) {
      char* const to = static_cast<char*>(args_.buffers(m, blockIdx.y).output);
      copy_run(block, from + offset, count * element_, to + at * element_);
    });
  }

 private:
  // The number of elements in a line is a power of two.
  RINGCOMM_DEVICE u64 whole_lines(u64 count) const { return (count + align_ - 1) & ~(align_ - 1); }

  const CallArgs& args_;
  const int rank_;
  const u64 element_, align_;
};

}  // namespace ringcomm::cuda
