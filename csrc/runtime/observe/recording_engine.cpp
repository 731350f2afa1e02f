#include "runtime/observe/recording_engine.h"

#include <functional>
#include <type_traits>
#include <utility>

#include "runtime/forks.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/site.h"

namespace ringcomm {

namespace {

// The state of a call that ended with an error. A call with wrong arguments was refused: the other ranks do not know of
// it.
CallState state_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    const bool refused = each.code() == ErrorCode::kInvalid || each.code() == ErrorCode::kUnsupported;
    return refused ? CallState::kRefused : CallState::kFailed;
  } catch (...) {
    return CallState::kFailed;
  }
}

// Returns the error; if it ends the communicator, with the communicator's number.
std::exception_ptr with_group(const std::exception_ptr& error, std::uint64_t group) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    return ends_communicator(each.code()) ? std::make_exception_ptr(Error(each, group)) : error;
  } catch (...) {
    return error;
  }
}

class RecordingRequest final : public Request {
 public:
  RecordingRequest(std::shared_ptr<Request> request, const std::shared_ptr<Engine>& engine, std::uint64_t group)
      : request_(std::move(request)), engine_(engine), group_(group) {}

  bool done() const override { return request_->done(); }
  void wait(std::int64_t timeout_ms) override {
    annotated([&] { request_->wait(timeout_ms); });
  }
  void on_done(std::function<void(std::exception_ptr)> callback) override {
    request_->on_done([group = group_, callback = std::move(callback)](std::exception_ptr error) {
      callback(error ? with_group(error, group) : nullptr);
    });
  }
  int source() const override { return request_->source(); }
  void start_now() override { request_->start_now(); }
  void join(std::uintptr_t stream) override {
    annotated([&] { request_->join(stream); });
  }

 private:
  template <typename Act>
  void annotated(const Act& act) const {
    const std::shared_ptr<Engine> kept = engine_.lock();  // a signal handler may drop the engine during the wait
    try {
      act();
    } catch (...) {
      if (!done()) throw;  // only this wait has timed out
      std::rethrow_exception(with_group(std::current_exception(), group_));
    }
  }

  const std::shared_ptr<Request> request_;
  const std::weak_ptr<Engine> engine_;
  const std::uint64_t group_;
};

class RecordingEngine final : public Engine {
 public:
  RecordingEngine(std::unique_ptr<Engine> engine, std::uint32_t capacity)
      : forks_(forks_so_far()),
        recorder_(capacity ? std::make_shared<FlightRecorder>(*engine, capacity) : nullptr),
        engine_(std::move(engine)),
        on_host_(engine_->device() < 0) {
    if (!recorder_) return;
    if (engine_->count_waits({recorder_, recorder_->waits()})) recorder_->has_waits();
    engine_->count_algorithms({recorder_, recorder_->algorithms()});
  }

  // Returns the recorded engine, which becomes a part of another engine.
  const std::shared_ptr<Engine>& absorb() {
    if (recorder_) recorder_->absorbed();
    engine_->absorbed();
    return engine_;
  }

  const char* kind() const override { return engine_->kind(); }
  int device() const override { return engine_->device(); }
  int rank() const override { return engine_->rank(); }
  int world_size() const override { return engine_->world_size(); }
  std::string handle() const override { return engine_->handle(); }
  void connect(const std::vector<std::string>& handles) override {
    engine_->connect(handles);
    if (recorder_) recorder_->connected(handles);
  }

  int run(const Call& call) override {
    return recorded(call, [&] { return engine_->run(call); });
  }
  std::optional<MessageInfo> probe(const Call& call, bool waits) override {
    if (waits) return recorded(call, [&] { return engine_->probe(call, true); });
    try {
      return engine_->probe(call, false);  // not recorded: the caller asks again and again
    } catch (...) {
      std::rethrow_exception(with_group(std::current_exception(), silent() ? 0 : recorder_->group()));
    }
  }
  std::shared_ptr<Request> submit(Call call) override {
    if (forked()) return engine_->submit(std::move(call));
    if (!recorder_) return std::make_shared<RecordingRequest>(engine_->submit(std::move(call)), engine_, 0);
    if (!call.site) call.site = site_here();  // another thread may execute it
    const BegunCall begun = recorder_->begin(call, true);
    std::shared_ptr<Request> request;
    try {
      request = engine_->submit(std::move(call));
    } catch (...) {
      failed({begun});
    }
    if (!on_host_)  // nothing polls for the end of a device's call
      recorder_->end(begun, CallState::kEnqueued);
    else
      request->on_done([recorder = recorder_, begun](std::exception_ptr error) {
        recorder->end(begun, error ? state_of(error) : CallState::kDone);
      });
    return std::make_shared<RecordingRequest>(std::move(request), engine_, recorder_->group());
  }
  void run_list(const std::vector<Call>& calls) override {
    if (silent()) return engine_->run_list(calls);
    std::vector<BegunCall> begun;
    for (const Call& call : calls) begun.push_back(recorder_->begin(call, false));
    const bool placed = calls.empty() || calls[0].site;
    const UnlocatedCalls late(placed ? nullptr : recorder_.get(), begun.data(), begun.size());
    try {
      engine_->run_list(calls);
    } catch (...) {
      failed(begun);
    }
    for (const BegunCall& call : begun) recorder_->end(call, end_state());
  }

  void pack(const PackCall& packing) override { engine_->pack(packing); }
  void combine(const CombineCall& combining) override { engine_->combine(combining); }
  void* allocate(std::size_t nbytes) override { return engine_->allocate(nbytes); }
  void release(void* data) override { engine_->release(data); }
  void abort(const std::string& reason, ErrorCode code) override { engine_->abort(reason, code); }
  bool aborted() const override { return engine_->aborted(); }
  std::string why_aborted() const override { return engine_->why_aborted(); }
  ErrorCode aborted_as() const override { return engine_->aborted_as(); }
  std::vector<std::string> agree_on_shrink(const std::string& payload, const std::vector<int>& members,
                                           std::int64_t limit_ms) override {
    return engine_->agree_on_shrink(payload, members, limit_ms);
  }
  std::uintptr_t lend_stream() override { return engine_->lend_stream(); }
  void take_back_stream(std::uintptr_t stream) override { engine_->take_back_stream(stream); }
  void set_timeout(std::int64_t timeout_ms) override { engine_->set_timeout(timeout_ms); }
  std::int64_t timeout() const override { return engine_->timeout(); }
  void close() override {
    engine_->close();
    if (!silent()) recorder_->closed();
  }
  bool closed() const override { return engine_->closed(); }
  bool runs_this_thread() const override { return engine_->runs_this_thread(); }
  std::vector<std::pair<std::string, std::string>> describe() const override { return engine_->describe(); }
  void synchronize(std::uintptr_t stream) override {
    try {
      engine_->synchronize(stream);
    } catch (...) {
      std::rethrow_exception(with_group(std::current_exception(), recorder_ ? recorder_->group() : 0));
    }
  }

 private:
  // In a forked child the recorder belongs to the parent.
  bool forked() const { return forks_ != forks_so_far(); }
  bool silent() const { return !recorder_ || forked(); }
  // Records a call that `act` makes, and returns its result.
  template <typename Act>
  std::invoke_result_t<Act> recorded(const Call& call, const Act& act) const {
    if (silent()) return act();
    const BegunCall begun = recorder_->begin(call, false);
    const UnlocatedCalls late(call.site ? nullptr : recorder_.get(), &begun, 1);
    try {
      const auto result = act();
      recorder_->end(begun, end_state());
      return result;
    } catch (...) {
      failed({begun});
    }
  }
  CallState end_state() const { return on_host_ ? CallState::kDone : CallState::kEnqueued; }
  // Ends calls with the current exception and rethrows it. The last call comes first, so that refused calls give their
  // numbers back.
  [[noreturn]] void failed(const std::vector<BegunCall>& begun) const {
    const std::exception_ptr error = std::current_exception();
    UnlocatedCalls::place();
    const CallState state = state_of(error);
    for (auto call = begun.rbegin(); call != begun.rend(); ++call) recorder_->end(*call, state);
    std::rethrow_exception(with_group(error, recorder_->group()));
  }

  const int forks_;
  const std::shared_ptr<FlightRecorder> recorder_;  // requests keep it alive; null: nothing is recorded
  const std::shared_ptr<Engine> engine_;
  const bool on_host_;
};

}  // namespace

std::unique_ptr<Engine> record(std::unique_ptr<Engine> engine) {
  return std::make_unique<RecordingEngine>(std::move(engine), FlightRecorder::capacity_asked_for());
}

std::shared_ptr<Engine> unrecorded(const std::shared_ptr<Engine>& engine) {
  auto* const recording = dynamic_cast<RecordingEngine*>(engine.get());
  if (!recording) return engine;
  return std::shared_ptr<Engine>(engine, recording->absorb().get());  // keeps the outer engine and its recorder alive
}

}  // namespace ringcomm
