#include "cuda/launch/builder.h"

#include <algorithm>

#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/call/signature.h"
#include "core/dispatch.h"
#include "core/schedule.h"
#include "cuda/launch/grid.h"

namespace ringcomm::cuda {

namespace {

bool overlap(const Part& a, const Part& b, std::size_t element) {
  const auto *x = static_cast<const char*>(a.data), *y = static_cast<const char*>(b.data);
  return a.count && b.count && x < y + b.count * element && y < x + a.count * element;
}

// The copies of a launch that knows all pointers: it has all ranks, and member y is rank y.
void list_copies(const std::vector<LaunchMember>& members, CopyArgs& args) {
  const int world_size = static_cast<int>(members.size());
  int next = 0;
  const auto call = [&](int y) -> const Call& { return members[y].batch->first(); };
  const auto input = [&](int y) { return input_parts(call(y)); };
  const auto output = [&](int y) { return output_parts(call(y)); };
  const auto add = [&](const void* source, void* target, std::size_t nbytes) {
    if (nbytes == 0 || source == target) return;
    args.copies[next++] = {static_cast<const char*>(source), static_cast<char*>(target), nbytes, 1};
  };
  // Copies the same piece to all ranks: target(p).
  const auto add_for_all = [&](const void* source, std::size_t nbytes, const auto& target) {
    const int first = next;
    for (int p = 0; p < world_size; ++p) add(source, target(p), nbytes);
    if (next > first) args.copies[first].targets = next - first;
  };
  for (int y = 0; y < world_size; ++y) {
    args.first[y] = next;
    const Call& mine = call(y);
    const std::size_t each = element_bytes(mine.dtype);
    switch (mine.op) {
      case Op::kAllGather:
        add_for_all(mine.input, mine.count * each, [&](int p) { return output(p).data(y); });
        break;
      case Op::kBroadcast: {  // every rank's blocks move a share of it
        const Slice share = shard_of(mine.count * each, world_size, y, kLineBytes);
        add_for_all(static_cast<const char*>(call(mine.root).input) + share.offset, share.count,
                    [&](int p) { return static_cast<char*>(call(p).output) + share.offset; });
        break;
      }
      case Op::kGather:
        add(mine.input, output(mine.root).data(y), mine.count * each);
        break;
      case Op::kScatter:
        add(input(mine.root).data(y), mine.output, mine.count * each);
        break;
      default:
        for (int i = 0, p = y; i < world_size; ++i, p = ring_next(p, world_size))
          add(input(y).data(p), output(p).data(y), input(y).count(p) * each);
    }
  }
  args.first[world_size] = next;
}

// The bytes that a rank gives to each peer and takes from it, where the peers launch separately.
void list_exchanges(const Call& call, int rank, int world_size, Exchange* with) {
  const Parts input = input_parts(call), output = output_parts(call);
  const std::size_t each = element_bytes(call.dtype);
  const auto give = [&](int p, const void* data, std::size_t count) {
    with[p].give = static_cast<const char*>(data);
    with[p].give_bytes = count * each;
  };
  const auto take = [&](int p, void* data, std::size_t count) {
    with[p].take = static_cast<char*>(data);
    with[p].take_bytes = count * each;
  };
  const bool at_root = rank == call.root;
  for (int p = 0; p < world_size; ++p) {
    switch (call.op) {
      case Op::kAllGather:
        give(p, call.input, call.count);
        take(p, output.data(p), output.count(p));
        break;
      case Op::kBroadcast:
        if (at_root) give(p, call.input, call.count);
        if (p == call.root) take(p, call.output, call.count);
        break;
      case Op::kGather:
        if (p == call.root) give(p, call.input, call.count);
        if (at_root) take(p, output.data(p), call.count);
        break;
      case Op::kScatter:
        if (at_root) give(p, input.data(p), call.count);
        if (p == call.root) take(p, call.output, call.count);
        break;
      case Op::kAllToAll:
        give(p, input.data(p), input.count(p));
        take(p, output.data(p), output.count(p));
        break;
      default:
        break;
    }
  }
}

}  // namespace

bool in_place(const Call& call, int world_size) {
  const Parts input = input_parts(call), output = output_parts(call);
  for (int p = 0; p < world_size; ++p)
    for (int q = 0; q < world_size; ++q)
      if (overlap({input.data(p), input.count(p)}, {output.data(q), output.count(q)}, element_bytes(call.dtype)))
        return true;
  return false;
}

bool has_packets(const Call& call, int world_size) {
  if (call.op != Op::kAllReduce || call.reduce_op == ReduceOp::kPremulSum) return false;
  if (world_size > kMaxPacketRanks) return false;
  const Arithmetic arithmetic = arithmetic_of(call.dtype, call.reduce_op);
  return oneshot_kernel(arithmetic.dtype, arithmetic.op) != nullptr;
}

bool in_one_piece(const Parts& parts, int world_size, std::size_t element) {
  if (parts.contiguous()) return true;
  for (int p = 0; p < world_size; ++p)
    if (parts.count(p) != parts.count(0) || parts.data(p) != parts.data(0) + p * parts.count(0) * element) return false;
  return true;
}

LaunchBuilder::LaunchBuilder(const std::vector<LaunchMember>& members, std::size_t lead, std::uint64_t number)
    : members_(members), lead_(lead), number_(number), setting_(members[lead].context->setting()) {
  if (call().op == Op::kAllToAll && setting_.known) check_all_to_all();
  const Algorithm requested = world_size() == 1 || (num_calls() > 1 && call().algorithm == Algorithm::kAuto)
                                  ? Algorithm::kDirect
                                  : call().algorithm;
  plan_ = plan_for(requested);
}

Plan LaunchBuilder::plan_for(Algorithm requested) const {
  return make_plan(call().op, requested, nbytes(), has_packets(call(), world_size()), in_place_anywhere(), setting_,
                   context().tuning());
}

void LaunchBuilder::agree() {
  if (plan_.algorithm != Algorithm::kCopyEngine) return CopyCall::check_no_copy_call(members_, number_);
  copies_.emplace(members_, lead_, number_);
  const bool copies = copies_->agree();
  for (const LaunchMember& member : members_) {
    ++member.context->copy_calls;
    if (!copies) ++member.context->refused_copy_calls;
  }
  if (copies) return;
  copies_.reset();
  plan_ = plan_for(Algorithm::kDirect);
}

// No signature says which rank sends how much to which.
void LaunchBuilder::check_all_to_all() const {
  for (int from = 0; from < world_size(); ++from)
    for (int to = 0; to < world_size(); ++to) {
      const std::size_t sent = input_parts(call(from)).count(to), expected = output_parts(call(to)).count(from);
      if (sent != expected)
        fail(ErrorCode::kMismatch, other_counts(call(to).root, to, expected, from, sent, "elements"), kAdvice);
    }
}

std::uint64_t LaunchBuilder::nbytes() const {
  std::uint64_t all = 0;
  for (int i = 0; i < num_calls(); ++i) all += message_bytes(call(lead_, i), world_size());
  return all;
}

// If ranks copy freely, an all_to_all in place would overwrite data that is still to be read.
bool LaunchBuilder::in_place_anywhere() const {
  if (call().op != Op::kAllToAll || world_size() == 1) return false;
  for (std::size_t y = 0; y < members_.size(); ++y)
    if (in_place(call(y), world_size())) return true;
  return false;
}

bool LaunchBuilder::enqueue() const {
  if (plan_.known && !plan_.waits && (nbytes() == 0 || call().op == Op::kBarrier)) return false;
  if (copies_)
    copies_->enqueue();
  else if (reduces(call().op) && !plan_.waits)
    reduce_known();
  else if (reduces(call().op))
    reduce();
  else if (plan_.algorithm == Algorithm::kRing)
    ring_copy();
  else if (plan_.known)
    copy();
  else if (needs_many_exchanges(setting_.ranks_of_a_device, world_size()))
    exchange(many_exchange_kernel());
  else
    exchange(exchange_kernel());
  return plan_.waits;
}

template <typename Args>
int LaunchBuilder::channels(Kernel<Args> kernel) const {
  const int room = room_for(kernel, plan_.threads, context().device(), context().rank());
  const int channels = channels_that_fit(plan_, room, setting_.ranks_of_a_device);
  if (channels == 0)
    fail(ErrorCode::kUnsupported, name(call().op), ": rank ", context().rank(), " expected room on the GPU for ",
         setting_.ranks_of_a_device, " ranks with a block of ", plan_.threads, " threads each, got room for ", room,
         " of them; use fewer ranks per GPU, or smaller blocks (RINGCOMM_CUDA_THREADS)");
  return channels;
}

template <typename Args>
void LaunchBuilder::launch_kernel(Kernel<Args> kernel, int channels, const Args& args) const {
  // Blocks of several ranks in one launch wait for each other, so all of them must be on the device together. A single
  // rank waits only for other launches, so its blocks may start one by one beside other work.
  const bool together = plan_.waits && members_.size() > 1;
  launch(kernel, name(call().op), dim3(channels, static_cast<unsigned>(members_.size())), plan_.threads, args, stream(),
         together, context().rank());
}

RankArgs LaunchBuilder::rank_args(const LaunchMember& member) const {
  RankArgs args = member.context->peer_memory().args();
  args.factor = member.batch->first().factor;
  if (!plan_.known && plan_.algorithm == Algorithm::kDirect) locate(args, member);
  return args;
}

// Fills in where the call's buffers lie for the peers.
void LaunchBuilder::locate(RankArgs& rank, const LaunchMember& member) const {
  const Call& call = member.batch->first();
  PeerMemory& memory = member.context->peer_memory();
  const std::size_t element = element_bytes(call.dtype);
  const auto place = [&](const Parts& parts, bool whole) {
    const bool one_piece = whole || in_one_piece(parts, world_size(), element);
    const std::size_t count = parts.count(0) * (whole ? 1 : world_size());
    if (!one_piece || !parts.data(0)) return Location{};
    return memory.locate(parts.data(0), count * element, member.batch->capture != 0, name(call.op));
  };
  const bool parts_in = call.op == Op::kReduceScatter || call.op == Op::kAllToAll || call.op == Op::kScatter;
  const bool parts_out = call.op == Op::kAllGather || call.op == Op::kAllToAll || call.op == Op::kGather;
  if (member.batch->num_calls > 1 || call.count == 0) return;
  rank.input = place(input_parts(call), !parts_in);
  rank.output = place(output_parts(call), !parts_out);
}

template <typename Args>
void LaunchBuilder::fill_common(Args& args) const {
  const Call& call = this->call(lead_);
  args.op = call.op;
  args.dtype = call.dtype;
  args.algorithm = call.algorithm;
  args.root = agreed_root(call);
  args.layout = setting_.layout;
  args.num_ranks = static_cast<std::int32_t>(members_.size());
  std::int64_t limit_ms = 0;
  for (std::size_t y = 0; y < members_.size(); ++y) {
    args.ranks[y] = rank_args(members_[y]);
    limit_ms = std::max(limit_ms, members_[y].batch->limit_ms);
  }
  args.timeout_ns = static_cast<std::uint64_t>(limit_ms) * 1000000;
  for (int i = 0; i < num_calls(); ++i) args.signed_count += agreed_count(this->call(lead_, i), world_size());
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// All ranks are in this launch.
void LaunchBuilder::reduce_known() const {
  const Arithmetic arithmetic = arithmetic_of(call().dtype, call().reduce_op);
  const Kernel<KnownArgs> kernel = known_kernel(arithmetic.dtype, arithmetic.op);
  if (!kernel) not_in_this_build(call().dtype, call().reduce_op);
  const bool parts = !call().input_parts.empty();
  KnownArgs args{};
  args.scatters = call().op == Op::kReduceScatter && !parts;
  args.num_sources = world_size();
  args.num_targets = call().op == Op::kAllReduce || args.scatters ? world_size() : 1;
  args.divisor = call().reduce_op == ReduceOp::kAvg ? world_size() : 1;
  args.scaled = call().reduce_op == ReduceOp::kPremulSum;
  for (std::size_t y = 0; y < members_.size(); ++y) args.factor[members_[y].rank] = call(y).factor;
  const int channels = this->channels(kernel);
  const auto launch = [&] {
    if (args.num_messages) launch_kernel(kernel, channels, args);
    args.num_messages = 0;
  };
  const void* sources[kMaxLaunchRanks];
  void* outputs[kMaxLaunchRanks];
  for (int m = 0; m < (parts ? world_size() : num_calls()); ++m) {
    for (std::size_t y = 0; y < members_.size(); ++y) {
      const Call& mine = call(y, parts ? 0 : m);
      sources[members_[y].rank] = parts ? input_parts(mine).data(m) : mine.input;
      outputs[members_[y].rank] = mine.output;
    }
    const std::size_t count = parts ? input_parts(call()).count(m) : call(lead_, m).count;
    if (count == 0) continue;
    const int first = parts ? m : call().op == Op::kReduce ? call().root : 0;
    args.add(sources, outputs + first, count * static_cast<std::uint64_t>(arithmetic.scale));
    if (args.full()) launch();
  }
  launch();
}

void LaunchBuilder::reduce() const {
  const Arithmetic arithmetic = arithmetic_of(call().dtype, call().reduce_op);
  const auto kernel_of = plan_.algorithm == Algorithm::kRing      ? ring_kernel
                         : plan_.algorithm == Algorithm::kOneshot ? oneshot_kernel
                                                                  : direct_kernel;
  const Kernel<CallArgs> kernel = kernel_of(arithmetic.dtype, arithmetic.op);
  if (!kernel) not_in_this_build(call().dtype, call().reduce_op);
  CallArgs args{};
  fill_common(args);
  args.signed_op = args.op;
  args.reduce_op = call().reduce_op;
  args.wide_packets = plan_.wide_packets;
  std::copy_n(context().peer_memory().ring_order(), kMaxRanks, args.ring_order);
  args.parts = call().op == Op::kReduceScatter && !call().input_parts.empty();
  if (args.parts && setting_.ranks_of_a_device * world_size() > kMaxMessageBuffers)
    return reduce_each_part(kernel, args, arithmetic.scale);
  args.num_messages = add_messages(args, arithmetic.scale);
  if (plan_.algorithm == Algorithm::kOneshot) return reduce_packets(kernel, args, element_bytes(arithmetic.dtype));
  launch_kernel(kernel, channels(kernel), args);
}

// One launch for each piece that the boxes can hold.
void LaunchBuilder::reduce_packets(Kernel<CallArgs> kernel, CallArgs& args, std::size_t element) const {
  const int channels = this->channels(kernel);
  const std::size_t count = args.counts[0];
  const std::size_t most = oneshot_elements(setting_.layout, channels, element);
  for (std::size_t at = 0; at == 0 || at < count; at += most) {
    for (std::size_t y = 0; y < members_.size(); ++y)
      args.buffers(0, y) = {static_cast<const char*>(call(y).input) + at * element,
                            static_cast<char*>(call(y).output) + at * element};
    args.counts[0] = smaller(most, count - at);
    launch_kernel(kernel, channels, args);
  }
}

// A reduce for each part: the parts of this many ranks do not fit into the arguments of one launch. The orders of
// summation are those of the reduce_scatter. A count that stands for parts tells the signatures from those of a rank
// that passes one tensor, which takes a single launch.
void LaunchBuilder::reduce_each_part(Kernel<CallArgs> kernel, CallArgs& args, int scale) const {
  args.op = Op::kReduce;
  args.signed_count |= kUneven;
  args.parts = 0;
  args.num_messages = 1;
  for (std::size_t y = 0; y < members_.size(); ++y)
    args.ranks[y].input = args.ranks[y].output = {};  // are of all parts
  for (args.root = 0; args.root < world_size(); ++args.root) {
    args.counts[0] = input_parts(call()).count(args.root) * scale;
    for (std::size_t y = 0; y < members_.size(); ++y)
      args.buffers(0, static_cast<int>(y)) = {input_parts(call(y)).data(args.root),
                                              members_[y].rank == args.root ? call(y).output : nullptr};
    launch_kernel(kernel, channels(kernel), args);
  }
}

// Counts are in elements of the kernel, `scale` per element of the call. Returns the number of messages.
int LaunchBuilder::add_messages(CallArgs& args, int scale) const {
  if (args.parts) {
    for (std::size_t y = 0; y < members_.size(); ++y) {
      const Parts input = input_parts(call(y));
      for (int p = 0; p < world_size(); ++p) {
        args.buffers(p, y).input = input.data(p);
        args.counts[p] = input.count(p) * scale;
      }
      args.buffers(members_[y].rank, y).output = call(y).output;
    }
    return world_size();
  }
  for (int i = 0; i < num_calls(); ++i) {
    args.counts[i] = call(lead_, i).count * scale;
    for (std::size_t y = 0; y < members_.size(); ++y) args.buffers(i, y) = {call(y, i).input, call(y, i).output};
  }
  return num_calls();
}

// ---- data movement --------------------------------------------------------------------------------------------------

// all_gather or broadcast of bytes.
void LaunchBuilder::ring_copy() const {
  CallArgs args{};
  fill_common(args);
  args.signed_op = args.op;
  std::copy_n(context().peer_memory().ring_order(), kMaxRanks, args.ring_order);
  args.num_messages = 1;
  args.counts[0] = call(lead_).count * element_bytes(call().dtype);
  for (std::size_t y = 0; y < members_.size(); ++y) args.buffers(0, y) = {call(y).input, output_parts(call(y)).data(0)};
  const Kernel<CallArgs> kernel = ring_copy_kernel();
  launch_kernel(kernel, channels(kernel), args);
}

void LaunchBuilder::copy() const {
  CopyArgs args{};
  list_copies(members_, args);
  if (args.first[world_size()] == 0) return;
  const Kernel<CopyArgs> kernel = copy_kernel();
  launch_kernel(kernel, channels(kernel), args);
}

template <typename Args>
void LaunchBuilder::exchange(Kernel<Args> kernel) const {
  Args args{};
  fill_common(args);
  args.same_for_all = call().op == Op::kAllGather || call().op == Op::kBroadcast;
  for (std::size_t y = 0; y < members_.size(); ++y)
    list_exchanges(call(y), members_[y].rank, world_size(), args.exchanges + y * world_size());
  launch_kernel(kernel, channels(kernel), args);
}

}  // namespace ringcomm::cuda
