#include "hierarchy/engine.h"

#include <atomic>
#include <chrono>
#include <mutex>

#include "core/call/check.h"
#include "core/error.h"
#include "hierarchy/abort_state.h"
#include "hierarchy/checked_request.h"
#include "hierarchy/collectives.h"
#include "runtime/forks.h"
#include "runtime/interrupt.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/trace.h"
#include "runtime/progress/work_queue.h"

namespace ringcomm {

namespace hierarchy {
namespace {

ErrorCode code_of(const TransportFailure& failure) {
  return !failure.theirs.empty() ? ErrorCode::kMismatch : failure.late ? ErrorCode::kTimeout : ErrorCode::kRankLost;
}

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(Topology topology, std::shared_ptr<Engine> local, std::shared_ptr<Transport> transport,
                     Options options)
      : local_(std::move(local)),
        transport_(std::move(transport)),
        collectives_(std::move(topology), local_, transport_, std::move(options)),
        abort_state_(std::make_shared<AbortState>(local_, concat("rank ", rank(), " on host ", name_of(rank())))),
        on_host_(local_->device() < 0),
        forks_(forks_so_far()),
        queue_(std::make_unique<WorkQueue>([this](const Call& call) { run_now(call); },
                                           [this](const char* call) { interrupt(call); }, false)) {
    transport_->on_wait([this](const char* call) {
      if (!signals_.interrupted()) return false;
      interrupt(call);
      return true;
    });
    transport_->on_failure([this](const TransportFailure& failure) {
      fail_group(explain("a call in flight", failure), code_of(failure));
    });
  }
  ~HierarchicalEngine() override {
    if (forked()) {  // the threads exist in the parent only, which may have held a lock when it forked
      queue_.release();
      new std::shared_ptr<Transport>(transport_);
      return;
    }
    if (!closed_.load() && !queue_->idle())
      abort(concat("rank ", rank(), " went away with calls in flight"), ErrorCode::kAborted);
    close();
  }

  const char* kind() const override { return local_->kind(); }
  int device() const override { return local_->device(); }
  int rank() const override { return topology().rank(); }
  int world_size() const override { return topology().world_size(); }
  std::string handle() const override { return local_->handle(); }
  // Takes the handles of all ranks; uses those of this host.
  void connect(const std::vector<std::string>& handles) override {
    std::vector<std::string> here;
    for (const int r : topology().ranks(topology().host())) here.push_back(handles.at(r));
    local_->connect(here);
    origin_ = {group_number(handles), rank(), world_size(), -1};
  }

  int run(const Call& call) override {
    check(call);
    if (point_to_point(call.op)) {
      const trace::CallSpan span(origin_, -1, call);
      const std::shared_ptr<Request> request = message(call);
      if (on_host_)
        request->wait(0);
      else
        request->join(call.stream);
      return call.op == Op::kRecv ? call.root : -1;
    }
    if (on_host_) return queue_->run(call), -1;
    const std::lock_guard<std::mutex> lock(mutex_);
    run_now(call);
    return -1;
  }
  std::shared_ptr<Request> submit(Call call) override {
    check(call);
    if (point_to_point(call.op)) return message(call);
    if (on_host_) return queue_->submit(std::move(call));
    const std::lock_guard<std::mutex> lock(mutex_);
    call.stream = transport_->fork(call.stream);
    run_now(call);
    // A device's call is over once its last transfer is; the host's engine knows whether this host's ranks did their
    // part.
    const auto check = [local = local_, op = call.op,
                        who = ": " + abort_state_->who()](const std::exception_ptr& error) {
      if (error || !local->aborted()) return;
      const std::string why = local->why_aborted();  // called first: it waits until the reason is known
      fail(local->aborted_as(), name(op), who, " expected every rank of its host to do its part, got an abort: ",
           why.empty() ? "another of them gave up" : why, "; create a new communicator");
    };
    return std::make_shared<CheckedRequest>(transport_->join(call, call.stream), check);
  }

  void pack(const PackCall& packing) override { local_->pack(packing); }
  void combine(const CombineCall& combining) override { local_->combine(combining); }
  void* allocate(std::size_t nbytes) override { return local_->allocate(nbytes); }
  void release(void* data) override { local_->release(data); }
  std::uintptr_t lend_stream() override { return local_->lend_stream(); }
  void take_back_stream(std::uintptr_t stream) override { local_->take_back_stream(stream); }

  void abort(const std::string& reason, ErrorCode code) override {
    if (forked()) return;
    local_->abort(reason.empty() ? "no reason given" : reason, code);
    transport_->abort();
  }
  bool aborted() const override { return local_->aborted(); }
  std::string why_aborted() const override { return local_->why_aborted(); }
  ErrorCode aborted_as() const override { return local_->aborted_as(); }
  void set_timeout(std::int64_t timeout_ms) override { local_->set_timeout(timeout_ms); }
  std::int64_t timeout() const override { return local_->timeout(); }

  void close() override {
    if (forked() || closed_.exchange(true)) return;
    abort_state_->close();
    if (signals_.runs_this()) interrupt("close");
    queue_->stop();
    transport_->close();
    transport_->on_failure(nullptr);
    local_->close();
  }
  bool closed() const override { return closed_.load(); }
  bool runs_this_thread() const override {
    return queue_->runs_this_thread() || transport_->runs_this_thread() || local_->runs_this_thread();
  }
  void synchronize(std::uintptr_t stream) override { local_->synchronize(stream); }
  void count_algorithms(std::shared_ptr<Flag> counts) override { collectives_.count_algorithms(std::move(counts)); }

  std::vector<std::pair<std::string, std::string>> describe() const override;

 private:
  const Topology& topology() const { return collectives_.topology(); }
  const std::string& name_of(int rank) const { return collectives_.options().names[topology().host_of(rank)]; }

  bool forked() const { return forks_ != forks_so_far(); }
  void check(const Call& call) const {
    if (closed() || forked()) report_unusable(name(call.op), rank(), closed(), forked());
    check_call(call, rank(), world_size());
    check_no_copy_engine(call, rank());
    abort_state_->check(call.op);
  }

  std::int64_t limit_of(const Call& call) const { return call.timeout_ms > 0 ? call.timeout_ms : timeout(); }
  std::shared_ptr<Request> message(const Call& call);
  void interrupt(const char* call);
  void run_now(const Call& call);
  [[noreturn]] void report(const Call& call, const TransportFailure& failure);
  void end_after(const std::exception_ptr& error);
  std::string explain(const std::string& what, const TransportFailure& failure) const;
  void fail_group(const std::string& reason, ErrorCode code) {
    if (aborted())
      transport_->abort();  // a local rank's abort does not end waits for another host
    else
      abort(reason, code);
  }

  const std::shared_ptr<Engine> local_;
  const std::shared_ptr<Transport> transport_;
  Collectives collectives_;
  const std::shared_ptr<AbortState> abort_state_;
  const bool on_host_;
  trace::Origin origin_;
  std::atomic<bool> closed_{false};
  SignalHandling signals_;
  std::mutex mutex_;  // devices: one call at a time is enqueued
  const int forks_;
  std::unique_ptr<WorkQueue> queue_;
};

// Starts a message of the user: within the host through its engine, to another host over the transport.
std::shared_ptr<Request> HierarchicalEngine::message(const Call& call) {
  if (call.root == kAnySource)
    fail(ErrorCode::kUnsupported, "recv: ", abort_state_->who(),
         " asked for a message of any rank, which a communicator of several hosts cannot wait for; name the source");
  const bool far = topology().host_of(call.root) != topology().host();
  Call inside = call;
  if (!far) inside.root = topology().local_of(call.root);
  auto message = far ? transport_->message(call, limit_of(call)) : local_->submit(std::move(inside));
  if (!on_host_) return message;  // a device's transport reports errors itself
  if (far) message->on_done([this](std::exception_ptr error) { end_after(error); });
  const auto check = [abort_state = abort_state_, op = call.op](const std::exception_ptr& error) {
    if (error) abort_state->explain(op, error);
  };
  return std::make_shared<CheckedRequest>(std::move(message), check);
}

// A message that fails ends the communicator, as it does inside a host.
void HierarchicalEngine::end_after(const std::exception_ptr& error) {
  if (!error || closed_.load()) return;
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    const bool lost = each.code() == ErrorCode::kAborted || each.code() == ErrorCode::kRankLost;
    if (lost) abort_state_->await();
    if (lost || each.code() == ErrorCode::kTimeout) fail_group(each.what(), each.code());
  } catch (...) {
  }
}

void HierarchicalEngine::interrupt(const char* call) {
  abort(concat(abort_state_->who(), " was interrupted by a signal in ", call), ErrorCode::kAborted);
}

void HierarchicalEngine::run_now(const Call& call) {
  const trace::CallSpan span(origin_, static_cast<std::int64_t>(collectives_.calls()), call);
  abort_state_->check(call.op);
  const std::int64_t limit_ms = limit_of(call);
  try {
    transport_->enter(call.stream);  // may reject the stream, before anything has happened
  } catch (const TransportFailure& failure) {
    report(call, failure);
  }
  try {
    collectives_.run(call, TransportClock::now() + std::chrono::milliseconds(limit_ms));
    transport_->leave(call.stream, call, limit_ms);
  } catch (const TransportFailure& failure) {
    report(call, failure);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAborted) abort_state_->check(call.op);
    fail_group(error.what(), error.code());
    throw;
  } catch (const std::exception& error) {  // for instance out of memory
    fail_group(concat(name(call.op), ": ", abort_state_->who(), " gave up: ", error.what()), ErrorCode::kAborted);
    throw;
  }
}

// Ends the communicator because of the transport's error, unless the error is a consequence of an earlier end.
void HierarchicalEngine::report(const Call& call, const TransportFailure& failure) {
  if (!failure.late) abort_state_->await();
  abort_state_->check(call.op);
  const std::string reason = explain(name(call.op), failure);
  fail_group(reason, code_of(failure));
  fail(code_of(failure), reason);
}

std::string HierarchicalEngine::explain(const std::string& what, const TransportFailure& failure) const {
  if (!failure.theirs.empty()) return collectives_.difference(failure.peer, failure.mine, failure.theirs);
  const std::string here = concat(what, ": ", abort_state_->who());
  const std::string peer =
      failure.peer < 0 ? "the other hosts" : concat("rank ", failure.peer, " on host ", name_of(failure.peer));
  return concat(here, failure.late ? " waited in vain for " : " lost ", peer, " over ", transport_->kind(), " (",
                failure.what, "); look at what happened there, and create a new communicator");
}

std::vector<std::pair<std::string, std::string>> HierarchicalEngine::describe() const {
  auto facts = local_->describe();
  std::string hosts;
  for (int h = 0; h < topology().num_hosts(); ++h)
    hosts += concat(h ? ", " : "", collectives_.options().names[h], " (", topology().num_ranks(h),
                    topology().num_ranks(h) == 1 ? " rank)" : " ranks)");
  for (auto& [fact, value] : facts)
    if (fact == "order") value = topology().order();
  facts.insert(facts.begin() + 1, {"hosts", hosts});
  facts.insert(facts.begin() + 2, {"between_hosts", transport_->kind()});
  facts.emplace_back("schedule_between_hosts", name(topology().in_order()));
  facts.emplace_back("sent_between_hosts_bytes", std::to_string(transport_->sent_bytes()));
  for (const auto& fact : transport_->describe()) facts.push_back(fact);
  return facts;
}

}  // namespace
}  // namespace hierarchy

std::unique_ptr<Engine> make_hierarchical_engine(int rank, const HostsOfRanks& hosts, std::shared_ptr<Engine> local,
                                                 std::shared_ptr<Transport> transport,
                                                 const hierarchy::Options& options) {
  hierarchy::Topology topology(rank, hosts);
  if (topology.num_hosts() < 2)
    fail(ErrorCode::kInvalid, "hosts: rank ", rank, " expected two hosts or more, got ", topology.num_hosts(),
         "; use the engine of the host alone");
  if (local->rank() != topology.local_rank() || local->world_size() != topology.local_world_size())
    fail(ErrorCode::kInvalid, "hosts: rank ", rank, " expected an engine of rank ", topology.local_rank(), " of ",
         topology.local_world_size(), " on its host, got rank ", local->rank(), " of ", local->world_size(),
         "; number the ranks of a host in their order");
  if (static_cast<int>(options.names.size()) != topology.num_hosts())
    fail(ErrorCode::kInvalid, "hosts: rank ", rank, " expected ", topology.num_hosts(), " names of hosts, got ",
         options.names.size());
  if (options.compressed && (!is_float(options.wire) || element_bytes(options.wire) > 2))
    fail(ErrorCode::kInvalid, "hosts: rank ", rank,
         " expected bfloat16, float16, float8_e4m3fn or float8_e5m2 between hosts, got ", name(options.wire));
  if (options.slice_bytes % 64 != 0)
    fail(ErrorCode::kInvalid, "hosts: rank ", rank, " expected slices of a multiple of 64 bytes, got ",
         options.slice_bytes);
  return std::make_unique<hierarchy::HierarchicalEngine>(std::move(topology), std::move(local), std::move(transport),
                                                         options);
}

}  // namespace ringcomm
