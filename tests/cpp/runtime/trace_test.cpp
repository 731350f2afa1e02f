// The timeline: threads that record while sessions begin and end, bounded room, and which spans belong to a session.
#include "runtime/observe/trace.h"

#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

using trace::SpanKind;

std::size_t count_spans(const trace::Timeline& timeline) {
  std::size_t count = 0;
  for (const auto& each : timeline.threads) count += each.spans.size();
  return count;
}

// What began before the session, or outlives it, is not in it.
void sessions_are_apart() {
  const Call call;
  {
    const trace::CallSpan early({1, 0, 1, -1}, 0, call);
    trace::start(100);
    const trace::Probe orphan(SpanKind::kStep);
  }
  require(count_spans(trace::stop()) == 0, "a span of a call that began before the session was recorded");
  {
    trace::start(100);
    const trace::CallSpan late({1, 0, 1, -1}, 0, call);
    require(count_spans(trace::stop()) == 0, "a span was handed over before it ended");
    trace::start(100);
    const trace::Probe orphan(SpanKind::kStep);
  }
  require(count_spans(trace::stop()) == 0, "a span of an earlier session was recorded");
  trace::start(100);
  {
    const trace::CallSpan outer({1, 0, 4, -1}, 7, call);
    {
      const trace::CallSpan inner({2, 1, 2, -1}, 8, call);
      const trace::Probe step(SpanKind::kStep);
    }
    const trace::Probe step(SpanKind::kStep);
  }
  const trace::Timeline timeline = trace::stop();
  require(timeline.threads.size() == 1 && count_spans(timeline) == 4, "not the spans of two nested calls");
  const auto& spans = timeline.threads[0].spans;  // in the order of their ends
  require(spans[0].origin.number == 8 && spans[1].origin.number == 8, "the inner call has its parts");
  require(spans[2].origin.number == 7 && spans[3].origin.number == 7, "the outer call has its parts");
  require(spans[3].begin_ns <= spans[1].begin_ns && spans[1].end_ns <= spans[3].end_ns, "calls nest");
}

void room_is_bounded() {
  trace::start(3);
  {
    const trace::CallSpan call({1, 0, 1, -1}, 0, Call{});
    for (int i = 0; i < 9; ++i) const trace::Probe probe(SpanKind::kCopy);
  }
  const trace::Timeline timeline = trace::stop();
  require(count_spans(timeline) == 3 && timeline.dropped == 7, "a full buffer counts what it drops");
}

// A forked child is not traced by its parent's session, and can be by one of its own.
void forked_child() {
  trace::start(100);
  const pid_t child = fork();
  if (child == 0) {
    bool apart = !trace::on();
    trace::start(100);
    {
      const trace::CallSpan call({1, 0, 1, -1}, 0, Call{});
    }
    apart = apart && count_spans(trace::stop()) == 1;
    _exit(apart ? 0 : 1);
  }
  {
    const trace::CallSpan call({1, 0, 1, -1}, 0, Call{});
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(status == 0, "a forked child has a timeline of its own");
  require(count_spans(trace::stop()) == 1, "a fork does not disturb the parent's session");
}

// Ranks that work while another thread switches the timeline on and off.
void threads_record(int sessions) {
  std::atomic<bool> done{false};
  std::size_t spans = 0;
  std::thread switching([&] {
    for (int i = 0; i < sessions; ++i) {
      trace::start(1000);
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      for (const auto& each : trace::stop().threads)
        for (const trace::Span& span : each.spans) {
          require(span.begin_ns <= span.end_ns && span.origin.world_size == 3, "a span is whole");
          ++spans;
        }
    }
    done.store(true);
  });
  run_threads(3, [&](Engine& engine) {
    std::vector<float> data(5000, 1.f);
    std::int32_t more = 1;
    while (more) {
      Call call;
      call.op = Op::kAllReduce;
      call.dtype = DType::kFloat32;
      call.algorithm = Algorithm::kRing;
      call.input = call.output = data.data();
      call.count = data.size();
      engine.submit(call)->wait();
      Call agree;  // all stop after the same call
      more = engine.rank() == 0 && !done.load();
      agree.op = Op::kBroadcast;
      agree.dtype = DType::kInt32;
      agree.input = agree.output = &more;
      agree.count = 1;
      engine.run(agree);
    }
  });
  switching.join();
  require(spans > 0, "ranks that work leave spans");
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  alarm(110);  // a hang ends the program
  sessions_are_apart();
  room_is_bounded();
  if (kProcesses) forked_child();
  threads_record(30);
  std::printf("runtime_trace_test passed\n");
}
