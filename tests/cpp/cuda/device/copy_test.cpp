// Data movement on the emulator: copies whose pointers are all known, collectives in place and through the staging
// areas, send and recv; random sizes, alignments and schedules, several calls in a row. And what happens when a rank
// does not come, or its sizes or tags differ.
//
//   cuda_copy_test [quick | number of cases [first seed]]
#include <algorithm>

#include "cpp/cuda/device/world.h"

namespace ringcomm::test {
namespace {

using cuda::CopyArgs;
using cuda::ExchangeArgs;
using cuda::Failure;
using cuda::Transfer;
using cuda::TransferArgs;
using cuda::WaitKind;

std::string text(std::uint64_t number) { return std::to_string(number); }

Memory noise(std::size_t nbytes, Random& random) {
  Memory memory(nbytes, random.one_in(3) ? random.below(16) : 0);
  fill(DType::kUInt8, memory.data(), nbytes, random);
  return memory;
}
std::string who_gave_up(const World& world) {
  for (int r = 0; r < world.world_size(); ++r)
    if (world.failure(r) != Failure::kNone) return "rank " + text(r) + " gave up";
  return "";
}

// ---- all pointers known -----------------------------------------------------------------------------------

std::string known_copies(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(1, 4), channels = random.between(1, 3);
  World world(small_layout(world_size, channels, random));
  CopyArgs args{};
  std::vector<Memory> sources, targets;
  int next = 0;
  for (int r = 0; r < world_size; ++r) {
    args.first[r] = next;
    for (int pieces = random.between(0, 3); pieces > 0; --pieces) {
      sources.push_back(noise(random.count(9000), random));
      const int copies = random.between(1, 4);
      for (int k = 0; k < copies; ++k) {
        targets.emplace_back(sources.back().nbytes(), random.one_in(4) ? random.below(16) : 0);
        args.copies[next++] = {sources.back().data(), targets.back().data(), sources.back().nbytes(),
                               static_cast<std::uint64_t>(k == 0 ? copies : 0)};
      }
    }
  }
  args.first[world_size] = next;
  const Form form = random_form(random, channels);
  if (!world.run(cuda::copy_kernel(), args, form)) return world.error;
  for (int i = 0; i < next; ++i)
    if (std::memcmp(args.copies[i].target, args.copies[i].source, args.copies[i].nbytes) != 0)
      return "copy " + text(i) + " of " + text(args.copies[i].nbytes) + " bytes";
  return "";
}

// ---- collectives ------------------------------------------------------------------------------------------

// One collective on all ranks. parts_[r][p] is what rank r gives to rank p.
class Collective {
 public:
  Collective(World& world, Random& random) : world_(world), world_size_(world.world_size()) {
    op_ = random.pick({Op::kAllGather, Op::kBroadcast, Op::kGather, Op::kScatter, Op::kAllToAll, Op::kAllToAll});
    root_ = static_cast<int>(random.below(world_size_));
    uneven_ = random.one_in(3) && (op_ == Op::kAllGather || op_ == Op::kAllToAll);
    in_place_ = !uneven_ && random.one_in(3);
    visible_ = random.one_in(2) ? -1 : random.one_in(2) ? 0 : static_cast<int>(random.below(world_size_)) + 1;
    const std::uint64_t most = random.one_in(3) ? 6000 : 600;
    const std::size_t even = random.count(most);
    for (int r = 0; r < world_size_; ++r)
      for (int p = 0; p < world_size_; ++p)
        nbytes_[r][p] = !uneven_ ? even : op_ == Op::kAllGather && p > 0 ? nbytes_[r][0] : random.count(most);
    for (int r = 0; r < world_size_; ++r) make_buffers(random, r);
    args_ = world.call<ExchangeArgs>(op_, DType::kUInt8, Algorithm::kDirect, root_, even | (uneven_ ? kUneven : 0));
    args_.same_for_all = same_for_all();
    for (int r = 0; r < world_size_; ++r) describe(r);
  }

  bool run(const Form& form) { return world_.run(cuda::exchange_kernel(), args_, form); }
  std::string what() const {
    return text(world_size_) + " ranks, " + name(op_) + (uneven_ ? ", uneven" : "") + (in_place_ ? ", in place" : "") +
           ", root " + text(root_) + ", " + text(nbytes_[0][0]) + " bytes, visible " + std::to_string(visible_) + ": ";
  }
  std::string wrong() const {
    for (int r = 0; r < world_size_; ++r)
      for (int p = 0; p < world_size_; ++p)
        if (takes(r, p) && nbytes_[p][r] != 0 && std::memcmp(place_of(r, p), parts_[p][r].data(), nbytes_[p][r]) != 0)
          return "what rank " + text(r) + " got from rank " + text(p);
    return "";
  }

 private:
  bool gives(int r, int p) const {
    if (op_ == Op::kGather) return p == root_;
    if (op_ == Op::kScatter || op_ == Op::kBroadcast) return r == root_;
    return true;
  }
  bool takes(int r, int p) const { return gives(p, r); }
  bool same_for_all() const { return op_ != Op::kScatter && op_ != Op::kAllToAll; }

  std::size_t given(int r) const {
    std::size_t all = 0;
    for (int p = 0; p < world_size_; ++p)
      if (gives(r, p)) all = same_for_all() ? nbytes_[r][p] : all + nbytes_[r][p];
    return all;
  }
  std::size_t taken(int r) const {
    std::size_t all = 0;
    for (int p = 0; p < world_size_; ++p)
      if (takes(r, p)) all += nbytes_[p][r];
    return all;
  }
  void make_buffers(Random& random, int r) {
    inputs_.push_back(noise(given(r), random));
    outputs_.emplace_back(taken(r), random.one_in(3) ? random.below(16) : 0);
    parts_.emplace_back(world_size_);
    for (int p = 0; p < world_size_; ++p)
      if (gives(r, p)) parts_[r][p].assign(piece_for(r, p), piece_for(r, p) + nbytes_[r][p]);
    if (!in_place_) return;
    char* const output = outputs_[r].data();
    if (op_ == Op::kAllToAll || (op_ == Op::kBroadcast && r == root_)) std::memcpy(output, inputs_[r].data(), given(r));
    if (op_ == Op::kAllGather || (op_ == Op::kGather && r == root_))
      std::memcpy(output + r * nbytes_[r][r], inputs_[r].data(), given(r));
  }
  const char* piece_for(int r, int p) const {
    std::size_t before = 0;
    for (int q = 0; q < p && !same_for_all(); ++q) before += nbytes_[r][q];
    return inputs_[r].data() + before;
  }
  // Where rank r finds its input, which may lie in its output, and the reverse.
  const char* input_of(int r) const {
    if (!in_place_ || op_ == Op::kScatter || inputs_[r].nbytes() == 0) return inputs_[r].data();
    if (op_ == Op::kAllToAll || (op_ == Op::kBroadcast && r == root_)) return outputs_[r].data();
    if (op_ == Op::kAllGather || (op_ == Op::kGather && r == root_)) return outputs_[r].data() + r * nbytes_[r][r];
    return inputs_[r].data();
  }
  char* place_of(int r, int p) const {
    std::size_t before = 0;
    for (int q = 0; q < p; ++q)
      if (takes(r, q)) before += nbytes_[q][r];
    if (in_place_ && op_ == Op::kScatter && r == root_) return inputs_[r].data() + root_ * nbytes_[r][r];
    return outputs_[r].data() + before;
  }

  // A plain address, or an offset into an arena that the peers see.
  Location location(int r, char* at) {
    if (visible_ >= 0 && visible_ - 1 != r) return {-1, 0, 0};
    const std::uint64_t where = reinterpret_cast<std::uint64_t>(at);
    if (r % 2 == 0) return {-1, 1, where};
    const int arena = at == outputs_[r].data() ? 2 : 1;
    for (int viewer = 0; viewer < world_size_; ++viewer) world_.arena(viewer, r, arena) = at - 256;
    return {arena, 1, 256};
  }
  void describe(int r) {
    args_.ranks[r].input = location(r, const_cast<char*>(input_of(r)));
    args_.ranks[r].output = location(r, outputs_[r].data());
    for (int p = 0; p < world_size_; ++p) {
      cuda::Exchange& exchange = args_.exchanges[r * world_size_ + p];
      if (gives(r, p)) {
        exchange.give = input_of(r) + (piece_for(r, p) - inputs_[r].data());
        exchange.give_bytes = nbytes_[r][p];
      }
      if (takes(r, p)) {
        exchange.take = place_of(r, p);
        exchange.take_bytes = nbytes_[p][r];
      }
    }
  }

  World& world_;
  const int world_size_;
  Op op_ = Op::kAllGather;
  int root_ = 0;
  bool uneven_ = false, in_place_ = false;
  int visible_ = 0;  // -1: the buffers of all ranks; 0: of none; r + 1: of rank r alone
  std::size_t nbytes_[cuda::kMaxLaunchRanks][cuda::kMaxLaunchRanks] = {};
  std::vector<Memory> inputs_, outputs_;
  std::vector<std::vector<std::vector<char>>> parts_;  // [rank][peer], as they were before
  ExchangeArgs args_{};
};

std::string collectives(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(1, random.one_in(4) ? 8 : 5), channels = random.between(1, 3);
  World world(small_layout(world_size, channels, random));
  for (int calls = random.between(1, 4); calls > 0; --calls) {
    Collective call(world, random);
    if (!call.run(random_form(random, channels))) return call.what() + world.error;
    if (const std::string who = who_gave_up(world); !who.empty()) return call.what() + who;
    if (const std::string wrong = call.wrong(); !wrong.empty()) return call.what() + wrong;
  }
  return "";
}

// Nobody comes out before all have come in.
std::string barriers(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 5), channels = random.between(1, 2);
  World world(small_layout(world_size, channels, random));
  ExchangeArgs args = world.call<ExchangeArgs>(Op::kBarrier, DType::kUInt8, Algorithm::kDirect, 0, 0);
  for (int calls = 0; calls < 3; ++calls)
    if (!world.run(cuda::exchange_kernel(), args, random_form(random, channels))) return world.error;
  Form form = random_form(random, channels);
  form.together = form.exact = false;
  form.timeout_ms = 30;
  form.absent = static_cast<int>(random.below(world_size));
  if (const std::string who = who_gave_up(world); !who.empty()) return who;
  if (!world.run(cuda::exchange_kernel(), args, form)) return world.error;
  for (int r = 0; r < world_size; ++r) {
    if (r == form.absent) continue;
    if (world.failure(r) == Failure::kNone) return "rank " + text(r) + " came out alone";
    const cuda::Status& status = world.status(r);
    if (world.failure(r) == Failure::kTimeout && status.peer != form.absent) return "another rank is blamed";
    if (static_cast<WaitKind>(status.wait) != WaitKind::kPublished) return "an odd kind of wait";
  }
  return "";
}

// What a rank gives is not what its peer expects: both sizes are in the report.
std::string uneven_sizes_differ(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 4);
  World world(small_layout(world_size, 1, random));
  Memory buffer(4096);
  ExchangeArgs args = world.call<ExchangeArgs>(Op::kAllToAll, DType::kUInt8, Algorithm::kDirect, 0, kUneven);
  const int giver = static_cast<int>(random.below(world_size)), taker = (giver + 1) % world_size;
  for (int r = 0; r < world_size; ++r)
    for (int p = 0; p < world_size; ++p) {
      cuda::Exchange& exchange = args.exchanges[r * world_size + p];
      exchange.give = exchange.take = buffer.data() + 128 * r;
      exchange.give_bytes = r == giver && p == taker ? 100 : 64;
      exchange.take_bytes = 64;
    }
  Form form = random_form(random, 1);
  form.exact = false;
  if (!world.run(cuda::exchange_kernel(), args, form)) return world.error;
  const cuda::Status& status = world.status(taker);
  if (world.failure(taker) != Failure::kMismatch || status.peer != giver) return "the reader did not notice";
  if (status.mine.count != (kUneven | 64) || status.theirs.count != (kUneven | 100))
    return "the report has other sizes";
  for (int r = 0; r < world_size; ++r)
    if (world.failure(r) == Failure::kNone) return "rank " + text(r) + " did not give up";
  return "";
}

// ---- send and recv ----------------------------------------------------------------------------------------

struct Message {
  int from, to, tag, channels;
  Memory sent, received;
  Location source, target;
  std::vector<char> text;
};

// Random messages between random pairs; each rank posts its own in the order in which they were made.
class Messages {
 public:
  Messages(World& world, Random& random, int number) : world_(world) {
    for (int i = 0; i < number; ++i) {
      const int from = static_cast<int>(random.below(world.world_size())), to = other(random, from);
      Memory sent = noise(random.count(6000) & ~std::uint64_t{3}, random);
      Memory received(sent.nbytes(), random.one_in(3) ? random.below(16) : 0);
      const Location source = place(random, from, to, i, sent), target = place(random, to, from, number + i, received);
      std::vector<char> text(sent.data(), sent.data() + sent.nbytes());
      messages_.push_back({from, to, random.between(0, 3), random.between(1, world.layout().p2p_channels),
                           std::move(sent), std::move(received), source, target, std::move(text)});
    }
    for (int r = 0; r < world.world_size(); ++r) launches_.push_back(args_of(r));
  }

  std::vector<TransferArgs>& launches() { return launches_; }
  // All grids are as high as the longest list needs; blocks without a transfer have nothing to do.
  bool run(Form form, cuda::Kernel<TransferArgs> kernel = cuda::transfer_kernel()) {
    int most = 1;
    for (const TransferArgs& args : launches_) most = args.num_transfers > most ? args.num_transfers : most;
    form.channels = world_.layout().p2p_channels;
    return world_.run_each(kernel, launches_, most, form);
  }
  std::string wrong() const {
    for (std::size_t i = 0; i < messages_.size(); ++i)
      if (!std::equal(messages_[i].text.begin(), messages_[i].text.end(), messages_[i].received.data()))
        return "message " + text(i) + " from rank " + text(messages_[i].from) + " to rank " + text(messages_[i].to);
    return "";
  }

 private:
  int other(Random& random, int from) const {
    const int to = static_cast<int>(random.below(world_.world_size()));
    return to == from ? (from + 1) % world_.world_size() : to;
  }
  // Nowhere, at an address, or in an arena that the peer has mapped, or has not mapped yet.
  Location place(Random& random, int rank, int peer, int arena, const Memory& memory) {
    const auto where = reinterpret_cast<std::uint64_t>(memory.data());
    switch (random.below(4)) {
      case 0:
        return {-1, 1, where};
      case 1:
        world_.arena(peer, rank, arena) = random.one_in(2) ? memory.data() - 256 : nullptr;
        return {arena, 1, 256};
      default:
        return {-1, 0, 0};
    }
  }
  TransferArgs args_of(int rank) {
    TransferArgs args{};
    args.layout = world_.layout();
    args.rank = world_.rank_args(rank);
    for (const Message& message : messages_) {
      if (message.from != rank && message.to != rank) continue;
      const bool sends = message.from == rank;
      const Memory& memory = sends ? message.sent : message.received;
      Transfer& transfer = args.transfers[args.num_transfers++];
      transfer.data = memory.data();
      transfer.nbytes = memory.nbytes();
      transfer.count = memory.nbytes() / 4;
      transfer.at = sends ? message.source : message.target;
      transfer.channels = static_cast<std::int8_t>(message.channels);
      transfer.peer = static_cast<std::int16_t>(sends ? message.to : message.from);
      transfer.tag = message.tag;
      transfer.sends = sends;
      transfer.dtype = DType::kFloat32;
    }
    return args;
  }

  World& world_;
  std::vector<Message> messages_;
  std::vector<TransferArgs> launches_;
};

std::string messages(std::uint64_t seed) {
  Random random(seed);
  World world(small_layout(random.between(2, 5), 1, random));
  for (int rounds = random.between(1, 3); rounds > 0; --rounds) {
    Messages some(world, random, random.between(1, 10));
    if (!some.run(random_form(random, 1))) return world.error;
    if (const std::string who = who_gave_up(world); !who.empty()) return who;
    if (const std::string wrong = some.wrong(); !wrong.empty()) return wrong;
  }
  return "";
}

// A sender whose kernel is over may write to its buffer at once.
void send_and_spend(TransferArgs args) {
  cuda::transfer_kernel()(args);
  __syncthreads();
  const auto first = static_cast<int>(blockIdx.y);
  const auto same_way = [&](int i) {
    return args.transfers[i].peer == args.transfers[first].peer &&
           args.transfers[i].sends == args.transfers[first].sends;
  };
  for (int i = 0; i < first; ++i)
    if (same_way(i)) return;
  for (int i = first; i < args.num_transfers; ++i)
    for (std::size_t at = threadIdx.x; same_way(i) && args.transfers[i].sends && at < args.transfers[i].nbytes;
         at += blockDim.x)
      cuda::store_one(args.transfers[i].data + at, '!');
}
std::string spent_messages(std::uint64_t seed) {
  Random random(seed);
  cuda::Layout layout = small_layout(random.between(2, 4), 1, random);
  layout.p2p_channels = 1;  // what the other blocks still read is not known in a kernel
  layout.p2p_slot_bytes = kLineBytes * random.between(1, 4);
  World world(layout);
  Messages some(world, random, random.between(1, 6));
  if (!some.run(random_form(random, 1), send_and_spend)) return world.error;
  if (const std::string who = who_gave_up(world); !who.empty()) return who;
  return some.wrong();
}

// The receiver expects another tag, count or type.
std::string messages_differ(std::uint64_t seed) {
  Random random(seed);
  World world(small_layout(2, 1, random));
  Messages one(world, random, 1);
  const int reader = one.launches()[0].transfers[0].sends ? 1 : 0;
  Transfer& expected = one.launches()[reader].transfers[0];
  switch (random.below(3)) {
    case 0:
      expected.tag += 1;
      break;
    case 1:
      expected.dtype = DType::kInt32;
      break;
    default:
      expected.count = expected.nbytes = 0;
  }
  const Transfer& sent = one.launches()[1 - reader].transfers[0];
  const bool differs = expected.tag != sent.tag || expected.dtype != sent.dtype || expected.count != sent.count;
  Form form = random_form(random, 1);
  form.exact = false;
  if (!one.run(form)) return world.error;
  if (!differs) return who_gave_up(world);
  const cuda::Status& status = world.status(reader);
  if (world.failure(reader) != Failure::kMismatch || status.peer != 1 - reader) return "the reader did not notice";
  if (status.mine.root != expected.tag || status.theirs.root != sent.tag || status.theirs.count != sent.count)
    return "the report is about something else";
  return "";
}

// Nobody answers: a receiver gives up, and so does a sender whose slots are full.
std::string message_without_reader(std::uint64_t seed) {
  Random random(seed);
  World world(small_layout(2, 1, random));
  Memory buffer(1 << 16);
  TransferArgs args{};
  args.layout = world.layout();
  args.rank = world.rank_args(0);
  args.num_transfers = 1;
  const Location at{-1, static_cast<std::int32_t>(random.below(2)), reinterpret_cast<std::uint64_t>(buffer.data())};
  const bool sends = random.one_in(2);
  args.transfers[0] = {
      buffer.data(), buffer.nbytes(), buffer.nbytes(), at, 0, 1, static_cast<std::int8_t>(world.layout().p2p_channels),
      sends,         DType::kUInt8};
  Form form = random_form(random, world.layout().p2p_channels);
  form.exact = false;
  form.timeout_ms = 30;
  if (!world.run_each(cuda::transfer_kernel(), std::vector<TransferArgs>{args}, 1, form)) return world.error;
  const cuda::Status& status = world.status(0);
  if (world.failure(0) != Failure::kTimeout || status.peer != 1) return "it did not give up";
  const WaitKind kind = args.transfers[0].sends ? WaitKind::kCredit : WaitKind::kMessage;
  return static_cast<WaitKind>(status.wait) == kind ? "" : "an odd kind of wait";
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto [quick, cases, first] = parse_arguments(argc, argv, 400);
  int bad = run_cases("copies, all known", cases, first, known_copies);
  bad += run_cases("copies, collectives", cases, first, collectives);
  bad += run_cases("copies, barriers", cases / 40 + 2, first, barriers);
  bad += run_cases("copies, uneven sizes differ", cases / 40 + 2, first, uneven_sizes_differ);
  bad += run_cases("send and recv", cases, first, messages);
  bad += run_cases("send and recv, spent at once", cases, first, spent_messages);
  bad += run_cases("send and recv differ", cases / 20 + 2, first, messages_differ);
  bad += run_cases("send and recv, nobody there", cases / 40 + 2, first, message_without_reader);
  return bad != 0;
}
