// The ring kernels on the emulator, against a scalar model of the rule: chunk c is combined in ring order c+1, c+2,
// ..., c, and rounds at every hop. Random ranks, channels, types, operators, counts, buffers and schedules; and what
// happens when a rank does not come, or calls something else.
//
//   cuda_ring_test [quick | number of cases [first seed]]
#include "cpp/cuda/device/world.h"
#include "cuda/device/arithmetic.h"
#include "cuda/device/move.h"

namespace ringcomm::test {
namespace {

using cuda::CallArgs;
using cuda::Failure;
using cuda::kWarp;
using cuda::WaitKind;

// One call of all ranks: buffers, arguments, and what must come out.
class RingCall {
 public:
  RingCall(World& world, Random& random, int channels)
      : world_(world), world_size_(world.world_size()), channels_(channels) {
    choose(random);
    for (int m = 0; m < num_messages_; ++m) make_message(random, m);
    args_ = world.call<CallArgs>(op_, dtype_, Algorithm::kRing, root_, random.next() >> 2);
    args_.reduce_op = reduce_op_;
    args_.num_messages = num_messages_;
    args_.parts = parts_;
    for (int i = 0; i < world_size_; ++i) {
      args_.ring_order[i] = static_cast<std::int8_t>(order_[i]);
      args_.ranks[i].factor = reduce_op_ == ReduceOp::kPremulSum ? random.pick({0.5, 1.0, -1.25, 0.3}) : 1;
    }
    for (int m = 0; m < num_messages_; ++m) {
      put(args_, m, messages_[m]);
      args_.counts[m] = kernel_count(m);
    }
  }

  bool run(const Form& form) { return world_.run(kernel(), args_, form); }
  CallArgs& args() { return args_; }
  cuda::Kernel<CallArgs> kernel() const {
    return reduces() ? cuda::ring_kernel(pair_.dtype, pair_.op) : cuda::ring_copy_kernel();
  }
  // Empty if all is right.
  std::string wrong() const {
    std::string text;
    if (!reduces()) return wrong_copy();
    dispatch_reduce(pair_.dtype, pair_.op, [&](auto element, auto combine) {
      using T = typename decltype(element)::Type;
      for (int m = 0; m < num_messages_ && text.empty(); ++m)
        for (int r = 0; r < world_size_ && text.empty(); ++r) text = wrong_message<T, decltype(combine)>(m, r);
    });
    return text;
  }
  std::string what() const {
    std::string text = std::string(name(op_)) + " " + name(dtype_) + " " + name(reduce_op_) + ", root " +
                       std::to_string(root_) + (in_place_ ? ", in place" : "") + ", counts";
    for (const auto& m : messages_) text += " " + std::to_string(m.count);
    text += ", order";
    for (int r : order_) text += " " + std::to_string(r);
    return text;
  }

 private:
  bool reduces() const { return op_ != Op::kAllGather && op_ != Op::kBroadcast; }

  void choose(Random& random) {
    op_ =
        random.pick({Op::kAllReduce, Op::kAllReduce, Op::kReduceScatter, Op::kReduce, Op::kAllGather, Op::kBroadcast});
    do {
      dtype_ = static_cast<DType>(random.below(static_cast<int>(DType::kBool) + 1));
      reduce_op_ =
          reduces() ? static_cast<ReduceOp>(random.below(static_cast<int>(ReduceOp::kBxor) + 1)) : ReduceOp::kSum;
    } while (!supports(dtype_, reduce_op_));
    pair_ = reduces() ? cuda::arithmetic_for(dtype_, reduce_op_)
                      : cuda::Arithmetic{DType::kUInt8, ReduceOp::kSum, static_cast<int>(element_bytes(dtype_))};
    root_ = static_cast<int>(random.below(world_size_));
    parts_ = op_ == Op::kReduceScatter && random.one_in(3);
    num_messages_ = parts_ ? world_size_ : random.one_in(3) ? random.between(2, 4) : 1;
    in_place_ = !parts_ && random.one_in(2);
    for (int i = 0; i < world_size_; ++i) order_.push_back(i);
    if (random.one_in(2))
      for (int i = world_size_ - 1; i > 0; --i) std::swap(order_[i], order_[random.below(i + 1)]);
  }

  // ---- buffers

  void make_message(Random& random, int m) {
    const bool splits = op_ == Op::kReduceScatter && !parts_, gathers = op_ == Op::kAllGather;
    const std::uint64_t most = (splits || gathers ? 2000 : 9000) / (num_messages_ * (world_size_ > 4 ? 2 : 1));
    const std::size_t element = element_bytes(dtype_), count = random.count(most), nbytes = count * element;
    const std::size_t shift = random.one_in(3) ? element * random.below(16 / element) : 0;
    Message message{};
    message.count = reduces() ? count : nbytes;
    for (int r = 0; r < world_size_; ++r) {
      const std::size_t large = nbytes * world_size_;
      inputs_.emplace_back(splits ? large : nbytes, shift);
      fill(dtype_, inputs_.back().data(), inputs_.back().nbytes() / element, random);
      originals_.emplace_back(inputs_.back().data(), inputs_.back().data() + inputs_.back().nbytes());
      outputs_.emplace_back(gathers ? large : nbytes, random.one_in(3) ? 0 : shift);
      message.input[r] = inputs_.back().data();
      message.output[r] = outputs_.back().data();
      if (in_place_) unite(message, r, nbytes);
      if (op_ == Op::kReduce && r != root_ && !in_place_) message.output[r] = nullptr;
      if (op_ == Op::kBroadcast && r != root_) message.input[r] = in_place_ ? message.output[r] : nullptr;
      if (parts_ && r != m) message.output[r] = nullptr;
    }
    messages_.push_back(message);
  }
  // Output and input are one buffer, the larger of the two.
  void unite(Message& message, int r, std::size_t nbytes) {
    char* const input = inputs_.back().data();
    char* const output = outputs_.back().data();
    if (op_ == Op::kAllGather) {
      std::memcpy(output + r * nbytes, input, nbytes);
      message.input[r] = output + r * nbytes;
    } else if (op_ == Op::kReduceScatter) {
      message.output[r] = input + r * nbytes;
    } else {
      message.output[r] = input;
    }
  }
  const std::vector<char>& original(int m, int r) const { return originals_[m * world_size_ + r]; }
  // Nobody may write to an input that is not an output too.
  bool input_changed(int m, int r) const {
    const Memory& now = inputs_[m * world_size_ + r];
    return !in_place_ && now.nbytes() != 0 && std::memcmp(now.data(), original(m, r).data(), now.nbytes()) != 0;
  }

  // ---- what must come out

  int position_of(int rank) const {
    int position = 0;
    while (order_[position] != rank) ++position;
    return position;
  }
  // Elements of the kernel in one part, or in a message without parts.
  std::size_t kernel_count(int m) const { return messages_[m].count * (reduces() ? pair_.scale : 1); }
  // The rank whose turn comes last for element i of message m, and with it the whole order.
  int last_rank(int m, std::size_t i) const {
    if (op_ == Op::kReduce) return root_;
    if (op_ == Op::kReduceScatter) return static_cast<int>(parts_ ? m : i / kernel_count(m));
    const std::size_t element = element_bytes(pair_.dtype), line = kLineBytes / element;
    const WindowCut cut = cuda::cut_for_channels(kernel_count(m), world_size_, world_.layout().slot_bytes / element,
                                                 line, cuda::kLeastBytes / element, channels_);
    return static_cast<int>(i / cut.slice_elements % world_size_);
  }
  template <typename T>
  T own_value(int m, int r, std::size_t i) const {
    const T value = at<T>(original(m, r).data(), i);
    if (reduce_op_ != ReduceOp::kPremulSum) return value;
    return Element<T>::store(scale(Element<T>::load(value), args_.ranks[r].factor));
  }
  template <typename T, typename Combine>
  T expected(int m, std::size_t i) const {
    const int last = position_of(last_rank(m, i));
    T partial = own_value<T>(m, order_[(last + 1) % world_size_], i);
    for (int hop = 2; hop <= world_size_; ++hop) {
      auto sum = Combine::apply(Element<T>::load(partial),
                                Element<T>::load(own_value<T>(m, order_[(last + hop) % world_size_], i)));
      if (hop == world_size_ && reduce_op_ == ReduceOp::kAvg) sum = divide(sum, world_size_);
      partial = Element<T>::store(sum);
    }
    return partial;
  }
  template <typename T, typename Combine>
  std::string wrong_message(int m, int r) const {
    const std::string where = " of message " + std::to_string(m) + " on rank " + std::to_string(r);
    if (input_changed(m, r)) return "the input" + where + " has changed";
    if ((op_ == Op::kReduce && r != root_) || (parts_ && m != r)) return "";
    const char* const got = static_cast<const char*>(messages_[m].output[r]);
    const std::size_t first = op_ == Op::kReduceScatter && !parts_ ? r * kernel_count(m) : 0;
    for (std::size_t i = 0; i < kernel_count(m); ++i)
      if (!same_bits(at<T>(got, i), expected<T, Combine>(m, first + i))) return "element " + std::to_string(i) + where;
    return "";
  }
  std::string wrong_copy() const {
    for (int m = 0; m < num_messages_; ++m)
      for (int r = 0; r < world_size_; ++r) {
        const std::size_t nbytes = kernel_count(m);
        const char* const got = static_cast<const char*>(messages_[m].output[r]);
        for (int part = 0; part < (op_ == Op::kAllGather ? world_size_ : 1); ++part) {
          const char* const want = original(m, op_ == Op::kAllGather ? part : root_).data();
          if (nbytes && std::memcmp(got + part * nbytes, want, nbytes) != 0)
            return "part " + std::to_string(part) + " of message " + std::to_string(m) + " on rank " +
                   std::to_string(r);
        }
      }
    return "";
  }

  World& world_;
  const int world_size_, channels_;
  Op op_ = Op::kAllReduce;
  DType dtype_ = DType::kFloat32;
  ReduceOp reduce_op_ = ReduceOp::kSum;
  cuda::Arithmetic pair_{};
  int root_ = 0, num_messages_ = 1, parts_ = 0;
  bool in_place_ = false;
  std::vector<int> order_;
  std::vector<Memory> inputs_, outputs_;
  std::vector<std::vector<char>> originals_;
  std::vector<Message> messages_;
  CallArgs args_{};
};

// Several calls in a row: what the channels know of earlier ones must be right.
std::string some_calls(std::uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, random.one_in(4) ? 8 : 5), channels = random.between(1, 3);
  World world(small_layout(world_size, channels, random));
  for (int calls = random.between(1, 3); calls > 0; --calls) {
    RingCall call(world, random, channels);
    const Form form = random_form(random, channels);
    const std::string where = std::to_string(world_size) + " ranks, " + call.what() + ": ";
    if (!call.run(form)) return where + world.error;
    for (int r = 0; r < world_size; ++r)
      if (world.failure(r) != Failure::kNone) return where + "rank " + std::to_string(r) + " gave up";
    if (const std::string wrong = call.wrong(); !wrong.empty()) return where + wrong;
  }
  return "";
}

// A world of one has nobody to wait for, and still a result.
std::string alone(std::uint64_t seed) {
  Random random(seed);
  World world(small_layout(1, 1, random));
  RingCall call(world, random, 1);
  if (!call.run(random_form(random, 1))) return world.error;
  const std::string wrong = call.wrong();
  return wrong.empty() ? "" : call.what() + ": " + wrong;
}

std::string absent(std::uint64_t seed) {
  return one_is_absent(seed, Algorithm::kRing, {WaitKind::kSlice, WaitKind::kCredit}, 2000);
}
std::string differs(std::uint64_t seed) { return one_differs(seed, Algorithm::kRing, 1000, 900); }

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const auto [quick, cases, first] = parse_arguments(argc, argv, 400);
  int bad = run_cases("ring, some calls", cases, first, some_calls);
  bad += run_cases("ring, a world of one", cases / 20 + 1, first, alone);
  bad += run_cases("ring, one is absent", cases / 40 + 2, first, absent);
  bad += run_cases("ring, one differs", cases / 40 + 2, first, differs);
  return bad != 0;
}
