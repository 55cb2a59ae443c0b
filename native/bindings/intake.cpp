#include "bindings/intake.hpp"

#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bindings/fingerprints.hpp"
#include "bindings/gil.hpp"
#include "bindings/py_index.hpp"
#include "core/intake.hpp"

namespace nb = nanobind;

namespace kvindex {

namespace {

// Everything is called by one thread, the one that receives.
struct PyIntake {
  PyIntake(int epoll, const std::vector<uintptr_t>& addresses) : intake(epoll) {
    static_assert(sizeof zmq % sizeof(uintptr_t) == 0);
    if (addresses.size() * sizeof(uintptr_t) != sizeof zmq) {
      throw nb::value_error("another number of functions than libzmq is asked for");
    }
    std::memcpy(&zmq, addresses.data(), sizeof zmq);
  }

  ZmqCalls zmq;
  Intake intake;
};

// A lane with what it needs kept alive.
struct PyLane {
  PyLane(nb::object intake_, nb::object index_, const Fingerprints& fingerprints, bool keeps_payloads)
      : intake(std::move(intake_)),
        index(std::move(index_)),
        lane(nb::cast<PyIntake&>(intake).zmq, nb::cast<PyIndex&>(index).index, fingerprints.maker,
             keeps_payloads) {}
  ~PyLane() { disarm(); }
  PyLane(const PyLane&) = delete;
  PyLane& operator=(const PyLane&) = delete;

  void arm(uintptr_t socket, uintptr_t monitor, int descriptor, int of_monitor,
           uint32_t rank, nb::bytes topic, uint64_t seq, double oldest_ts, bool is_named) {
    disarm();
    lane.arm(reinterpret_cast<void*>(socket), reinterpret_cast<void*>(monitor),
             {rank, {static_cast<const char*>(topic.data()), topic.size()}, seq, oldest_ts, is_named});
    socket_descriptor = descriptor;
    monitor_descriptor = of_monitor;
    owner().add(lane, socket_descriptor, monitor_descriptor);
  }
  void disarm() {
    lane.disarm();
    owner().remove(lane, socket_descriptor, monitor_descriptor);
  }
  Intake& owner() { return nb::cast<PyIntake&>(intake).intake; }

  // (bytes received, first seq, timestamps, fingerprints, payloads) since the last call.
  nb::tuple collect() {
    const Lane::Taken taken = lane.collect();
    nb::list timestamps, fingerprints, payloads;
    for (const Lane::TakenBatch& batch : taken.batches) {
      timestamps.append(batch.ts);
      fingerprints.append(batch.fingerprint);
      if (lane.keeps_payloads()) {
        payloads.append(nb::bytes(batch.payload.data(), batch.payload.size()));
      }
    }
    return nb::make_tuple(taken.bytes, lane.next_seq() - taken.batches.size(), timestamps,
                          fingerprints, payloads);
  }
  nb::list collect_left() {
    nb::list messages;
    for (const auto& frames : lane.collect_left()) {
      nb::list message;
      for (const std::string& frame : frames) {
        message.append(nb::bytes(frame.data(), frame.size()));
      }
      messages.append(message);
    }
    return messages;
  }

  nb::object intake;
  nb::object index;
  int socket_descriptor = -1;
  int monitor_descriptor = -1;
  Lane lane;
};

}  // namespace

void bind_intake(nb::module_& module) {
  nb::class_<PyIntake>(module, "Intake")
      .def(nb::init<int, const std::vector<uintptr_t>&>(), nb::arg("epoll"), nb::arg("zmq_calls"))
      .def("wait", [](PyIntake& self, double seconds, double show_after, bool shows_at_once) {
        const auto found = [&] {
          const GilReleased released;
          return self.intake.wait(seconds, show_after, shows_at_once);
        }();
        return nb::make_tuple(found.ready, found.more, found.taken);
      }, nb::arg("seconds"), nb::arg("show_after"), nb::arg("shows_at_once"))
      .def_prop_ro("rounds", [](const PyIntake& self) { return self.intake.rounds(); })
      .def("longest_round", [](PyIntake& self) { return self.intake.longest_round(); });
  nb::class_<PyLane>(module, "Lane")
      .def(nb::init<nb::object, nb::object, const Fingerprints&, bool>(), nb::arg("intake"),
           nb::arg("index"), nb::arg("fingerprints"), nb::arg("keeps_payloads"))
      .def("arm", &PyLane::arm)
      .def("disarm", &PyLane::disarm)
      .def_prop_ro("has_taken", [](const PyLane& self) { return self.lane.has_taken(); })
      .def("collect", &PyLane::collect)
      .def("collect_left", &PyLane::collect_left);
}

}  // namespace kvindex
