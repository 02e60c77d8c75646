// The same library from C++17: scopes as objects, threads, a lambda as cancel action.
#include "check.h"
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

class Task {
 public:
  explicit Task(std::uint64_t key) : handle_(atropos_create_cancel(key)) {}
  ~Task() { atropos_free_cancel(handle_); }
  Task(const Task &) = delete;
  Task &operator=(const Task &) = delete;
  atropos_task_t handle() const { return handle_; }

 private:
  atropos_task_t handle_;
};

class TracedMutex {
 public:
  explicit TracedMutex(const char *name) : resource_(atropos_resource_register(name, ATROPOS_LOCK)) {}
  void lock() {
    if (!mutex_.try_lock()) {
      atropos_trace_wait(resource_, 1);
      mutex_.lock();
    }
    atropos_trace_get(resource_, 1);
  }
  void unlock() {
    atropos_trace_free(resource_, 1);
    mutex_.unlock();
  }
  atropos_resource_t resource() const { return resource_; }

 private:
  std::mutex mutex_;
  atropos_resource_t resource_;
};

}  // namespace

int main() {
  atropos_config config{};
  config.size = sizeof config;
  config.mode = ATROPOS_MODE_ENFORCE;
  config.slo_ms = 1000;
  CHECK_EQ(atropos_init(&config), ATROPOS_OK);
  std::atomic<int> cancels{0};
  atropos_cancel_fn action = [](const atropos_cancel_request *, void *arg) {
    ++*static_cast<std::atomic<int> *>(arg);
    return 0;
  };
  CHECK_EQ(setCancelAction(action, &cancels), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);

  TracedMutex mutex("a C++ mutex");
  CHECK(mutex.resource() != 0);
  long counter = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; i++) {
        Task task(1000 + static_cast<std::uint64_t>(t));
        CHECK(task.handle() != 0);
        const std::lock_guard<TracedMutex> guard(mutex);
        counter++;
        CHECK_EQ(atropos_trace_cancel_requested(), 0);
      }
    });
  for (auto &thread : threads) thread.join();
  CHECK_EQ(counter, 8000);
  CHECK_EQ(cancels.load(), 0);
  {
    Task task(5);
    const std::lock_guard<TracedMutex> guard(mutex);
    CHECK(task_holds(5, "a C++ mutex"));
  }
  const std::string text = [] {
    char *owned = stats();
    std::string copy(owned);
    std::free(owned);
    return copy;
  }();
  CHECK(text.front() == '{' && text.back() == '}');
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}
