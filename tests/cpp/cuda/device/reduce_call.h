// Random calls of the kernels that reduce in canonical order (direct and oneshot), and what must come out: the tree
// over the ranks, element by element, written once more.
#pragma once

#include <memory>

#include "cpp/cuda/device/world.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::test {

enum class ReducePath { kKnown, kStaged, kVisible, kLL, kLL128 };
inline const char* name(ReducePath path) {
  const char* const names[] = {"known", "staged", "visible", "LL", "LL128"};
  return names[static_cast<int>(path)];
}

class ReduceCall {
 public:
  // `number`: of calls that exist at the same time, each has its own.
  ReduceCall(World& world, Random& random, ReducePath path, int channels, int number = 0)
      : world_(world), world_size_(world.world_size()), channels_(channels), number_(number), path_(path) {
    choose(random);
    for (int m = 0; m < num_messages_; ++m) make_message(random, m);
    args_ = world.call<cuda::CallArgs>(op_, dtype_, packets() ? Algorithm::kOneshot : Algorithm::kDirect, root_,
                                       random.next() >> 2);
    args_.reduce_op = reduce_op_;
    args_.num_messages = num_messages_;
    args_.parts = parts_;
    args_.wide_packets = path == ReducePath::kLL128;
    for (int m = 0; m < num_messages_; ++m) put(args_, m, messages_[m]);
    for (int r = 0; r < world_size_; ++r) {
      if (reduce_op_ == ReduceOp::kPremulSum) args_.ranks[r].factor = random.pick({0.5, 1.0, -1.25, 0.3});
      if (path == ReducePath::kVisible) show(random, r);
    }
    // Who does not see one buffer must not try to work in place, and everybody has to know.
    if (path == ReducePath::kVisible && random.one_in(4)) args_.ranks[random.below(world_size_)].input.visible = 0;
  }

  bool run(const Form& form) {
    return path_ == ReducePath::kKnown ? run_known(form) : world_.run(kernel(), args_, form);
  }
  cuda::CallArgs& args() { return args_; }
  cuda::Kernel<cuda::CallArgs> kernel() const {
    return packets() ? cuda::oneshot_kernel(pair_.dtype, pair_.op) : cuda::direct_kernel(pair_.dtype, pair_.op);
  }
  // Copies of the outputs, to be filled as soon as a rank's call is over, and put back before wrong() looks.
  std::vector<Memory>& snapshots() { return snapshots_; }
  void take_snapshots_back() {
    for (int m = 0; m < num_messages_; ++m)
      for (int r = 0; r < world_size_; ++r)
        if (messages_[m].output[r] && snapshots_[m * world_size_ + r].nbytes())
          std::memcpy(messages_[m].output[r], snapshots_[m * world_size_ + r].data(),
                      snapshots_[m * world_size_ + r].nbytes());
  }
  // Empty if all is right.
  std::string wrong() const {
    std::string text;
    dispatch_reduce(dtype_, reduce_op_, [&](auto element, auto combine) {
      using T = typename decltype(element)::Type;
      for (int m = 0; m < num_messages_ && text.empty(); ++m)
        for (int r = 0; r < world_size_ && text.empty(); ++r) text = wrong_message<T, decltype(combine)>(m, r);
    });
    return text;
  }
  std::string what() const {
    std::string text = std::string(name(path_)) + " " + name(op_) + " " + name(dtype_) + " " + name(reduce_op_) +
                       ", root " + std::to_string(root_) + (in_place_ ? ", in place" : "") + (parts_ ? ", parts" : "") +
                       ", " + std::to_string(channels_) + " channels, counts";
    for (const std::size_t count : counts_) text += " " + std::to_string(count);
    return text;
  }

 private:
  // In as many launches as it takes.
  bool run_known(const Form& form) {
    cuda::KnownArgs args{};
    args.scatters = op_ == Op::kReduceScatter && !parts_;
    args.num_sources = world_size_;
    args.num_targets = op_ == Op::kAllReduce || args.scatters ? world_size_ : 1;
    args.divisor = args_.divisor();
    args.scaled = args_.scales();
    for (int r = 0; r < world_size_; ++r) args.factor[r] = args_.ranks[r].factor;
    std::vector<cuda::KnownArgs> launches;
    for (int m = 0; m < num_messages_; ++m) {
      const Message& message = messages_[m];
      args.add(message.input, message.output + (parts_ ? m : op_ == Op::kReduce ? root_ : 0), message.count);
      if (!args.full() && m + 1 < num_messages_) continue;
      launches.push_back(args);
      args.num_messages = 0;
    }
    return world_.run_each(cuda::known_kernel(pair_.dtype, pair_.op), launches, world_size_, form);
  }
  bool packets() const { return path_ == ReducePath::kLL || path_ == ReducePath::kLL128; }
  bool has_packets() const { return reduce_op_ != ReduceOp::kPremulSum && cuda::oneshot_kernel(pair_.dtype, pair_.op); }

  void choose(Random& random) {
    op_ = packets() ? Op::kAllReduce : random.pick({Op::kAllReduce, Op::kAllReduce, Op::kReduceScatter, Op::kReduce});
    do {
      dtype_ = static_cast<DType>(random.below(static_cast<int>(DType::kBool) + 1));
      reduce_op_ = static_cast<ReduceOp>(random.below(static_cast<int>(ReduceOp::kBxor) + 1));
      pair_ = cuda::arithmetic_of(dtype_, reduce_op_);
    } while (!supports(dtype_, reduce_op_) || (packets() && !has_packets()));
    root_ = static_cast<int>(random.below(world_size_));
    parts_ = op_ == Op::kReduceScatter && random.one_in(3);
    num_messages_ = parts_ ? world_size_ : !packets() && random.one_in(3) ? random.between(2, 6) : 1;
    in_place_ = !parts_ && random.one_in(2);
    any_bits_ = random.one_in(3);
  }

  // ---- buffers

  void make_message(Random& random, int m) {
    const bool splits = op_ == Op::kReduceScatter && !parts_;
    const std::size_t element = element_bytes(dtype_);
    const std::uint64_t most = packets() ? channels_ * world_.layout().packet_bytes / element
                               : splits  ? 2000 / num_messages_
                                         : 9000 / (num_messages_ * (world_size_ > 4 ? 2 : 1));
    const std::size_t count = random.count(most), nbytes = count * element;
    const std::size_t shift = random.one_in(3) ? element * random.below(16 / element) : 0;
    Message message{};
    message.count = count * pair_.scale;
    counts_.push_back(count);
    for (int r = 0; r < world_size_; ++r) {
      inputs_.emplace_back(splits ? nbytes * world_size_ : nbytes, shift);
      fill_input(random, inputs_.back());
      originals_.emplace_back(inputs_.back().data(), inputs_.back().data() + inputs_.back().nbytes());
      outputs_.emplace_back(nbytes, random.one_in(3) ? 0 : shift);
      snapshots_.emplace_back(nbytes);
      message.input[r] = inputs_.back().data();
      message.output[r] = outputs_.back().data();
      if (in_place_) message.output[r] = inputs_.back().data() + (splits ? r * nbytes : 0);
      if (op_ == Op::kReduce && r != root_ && !in_place_) message.output[r] = nullptr;
      if (parts_ && r != m) message.output[r] = nullptr;
    }
    messages_.push_back(message);
  }
  void fill_input(Random& random, const Memory& to) const {
    if (!any_bits_) return fill(dtype_, to.data(), to.nbytes() / element_bytes(dtype_), random);
    for (std::size_t i = 0; i < to.nbytes(); ++i) to.data()[i] = static_cast<char>(random.next());
  }
  // Rank r's buffers as the peers reach them: at a plain address, or in an arena.
  void show(Random& random, int r) {
    const auto locate = [&](const void* at, int arena) -> Location {
      if (!at) return {-1, 0, 0};
      if (random.one_in(2)) return {-1, 1, reinterpret_cast<std::uint64_t>(at)};
      const std::uint64_t offset = random.below(1000);
      for (int q = 0; q < world_size_; ++q)
        world_.arena(q, r, arena) = static_cast<char*>(const_cast<void*>(at)) - offset;
      return {arena, 1, offset};
    };
    args_.ranks[r].input = locate(messages_[0].input[r], 2 * number_);
    args_.ranks[r].output = locate(messages_[0].output[r], 2 * number_ + 1);
  }
  const std::vector<char>& original(int m, int r) const { return originals_[m * world_size_ + r]; }

  // ---- what must come out

  template <typename T, typename Combine>
  auto tree(int m, std::size_t i, int first, int ranks) const -> typename Element<T>::Acc {
    if (ranks == 1) {
      const auto value = Element<T>::load(at<T>(original(m, first).data(), i));
      return reduce_op_ == ReduceOp::kPremulSum ? scale(value, args_.ranks[first].factor) : value;
    }
    const int left = tree_split(ranks);
    return Combine::apply(tree<T, Combine>(m, i, first, left), tree<T, Combine>(m, i, first + left, ranks - left));
  }
  template <typename T, typename Combine>
  T expected(int m, std::size_t i) const {
    auto all = tree<T, Combine>(m, i, 0, world_size_);
    if (reduce_op_ == ReduceOp::kAvg) all = divide(all, world_size_);
    return Element<T>::store(all);
  }
  template <typename T, typename Combine>
  std::string wrong_message(int m, int r) const {
    const std::string where = " of message " + std::to_string(m) + " on rank " + std::to_string(r);
    const Memory& input = inputs_[m * world_size_ + r];
    if (!in_place_ && input.nbytes() && std::memcmp(input.data(), original(m, r).data(), input.nbytes()) != 0)
      return "the input" + where + " has changed";
    if ((op_ == Op::kReduce && r != root_) || (parts_ && m != r) || counts_[m] == 0) return "";
    const std::size_t first = op_ == Op::kReduceScatter && !parts_ ? r * counts_[m] : 0;
    const std::vector<T> cpu = cpu_result<T>(m, first);
    for (std::size_t i = 0; i < counts_[m]; ++i) {
      const T got = at<T>(messages_[m].output[r], i);
      if (!same_bits(got, expected<T, Combine>(m, first + i))) return "element " + std::to_string(i) + where;
      if (!same_bits(got, cpu[i])) return "the CPU has another element " + std::to_string(i) + where;
    }
    return "";
  }
  // The same elements through the loops of the CPU engine.
  template <typename T>
  std::vector<T> cpu_result(int m, std::size_t first) const {
    std::vector<T> result(counts_[m]);
    const void* sources[cuda::kMaxRanks];
    double factors[cuda::kMaxRanks];
    std::vector<std::vector<T>> values(world_size_, std::vector<T>(counts_[m]));
    for (int p = 0; p < world_size_; ++p) {
      std::memcpy(values[p].data(), original(m, p).data() + first * sizeof(T), counts_[m] * sizeof(T));
      sources[p] = values[p].data();
      factors[p] = args_.ranks[p].factor;
    }
    void* outputs[] = {result.data()};
    cpu::kernels().reduce(
        {dtype_, reduce_op_, sources, world_size_, factors, world_size_, outputs, 1, counts_[m], false});
    return result;
  }

  World& world_;
  const int world_size_, channels_, number_;
  const ReducePath path_;
  Op op_ = Op::kAllReduce;
  DType dtype_ = DType::kFloat32;
  ReduceOp reduce_op_ = ReduceOp::kSum;
  cuda::Arithmetic pair_{};
  int root_ = 0, num_messages_ = 1, parts_ = 0;
  bool in_place_ = false, any_bits_ = false;
  std::vector<Memory> inputs_, outputs_, snapshots_;
  std::vector<std::vector<char>> originals_;
  std::vector<std::size_t> counts_;
  std::vector<Message> messages_;
  cuda::CallArgs args_{};
};

// A few calls in a row on one world, each in one of `paths`: what the channels know of earlier ones must be right.
inline std::string calls_in_a_row(World& world, Random& random, std::initializer_list<ReducePath> paths, int calls) {
  for (; calls > 0; --calls) {
    const int channels = random.between(1, world.layout().channels);
    ReduceCall call(world, random, random.pick(paths), channels);
    const Form form = random_form(random, channels, {1, 2, 2});
    const std::string where = std::to_string(world.world_size()) + " ranks, " + call.what() + ": ";
    if (!call.run(form)) return where + world.error;
    for (int r = 0; r < world.world_size(); ++r)
      if (world.failure(r) != cuda::Failure::kNone) return where + "rank " + std::to_string(r) + " gave up";
    if (const std::string wrong = call.wrong(); !wrong.empty()) return where + wrong;
  }
  return "";
}

// Calls of one channel that follow each other on every rank without a host between, as in one stream: a rank that is
// done goes on at once, and takes its result with it, whatever the others still do.
struct Program {
  std::vector<ReduceCall*> calls;
};
inline void run_program(const Program* program) {
  const int rank = static_cast<int>(blockIdx.y), world_size = static_cast<int>(gridDim.y);
  for (ReduceCall* call : program->calls) {
    const cuda::CallArgs& args = call->args();
    call->kernel()(args);
    __syncthreads();
    for (int m = 0; m < args.num_messages; ++m) {
      const Memory& snapshot = call->snapshots()[m * world_size + rank];
      const char* const output = static_cast<const char*>(args.buffers(m, rank).output);
      for (std::size_t i = threadIdx.x; output && i < snapshot.nbytes(); i += blockDim.x)
        snapshot.data()[i] = cuda::load_one(output + i);
    }
    __syncthreads();
  }
}
inline std::string calls_in_a_stream(World& world, Random& random, std::initializer_list<ReducePath> paths,
                                     int num_calls) {
  std::vector<std::unique_ptr<ReduceCall>> calls;
  Program program;
  std::string text;
  for (; num_calls > 0; --num_calls) {
    calls.push_back(std::make_unique<ReduceCall>(world, random, random.pick(paths), 1, num_calls));
    calls.back()->args().timeout_ns = 600ull * 1000000000;
    program.calls.push_back(calls.back().get());
    text += calls.back()->what() + "; ";
  }
  emulator::Options options;
  options.seed = random.next();
  emulator::Simulation simulation(options);
  simulation.launch("program", run_program, dim3(1, world.world_size()), dim3(random.one_in(2) ? 8 : 16),
                    static_cast<const Program*>(&program));
  if (!simulation.run()) return text + simulation.error;
  for (const auto& call : calls) {
    call->take_snapshots_back();
    if (const std::string wrong = call->wrong(); !wrong.empty()) return text + "in call " + call->what() + ": " + wrong;
  }
  return "";
}

}  // namespace ringcomm::test
