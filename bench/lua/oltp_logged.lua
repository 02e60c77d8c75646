-- The stock OLTP load with one record per transaction, so that throughput, quantiles and stalls are computed
-- exactly over any part of a run (sysbench itself reports per-interval percentiles only).
--
-- Environment (set by the bench driver):
--   ATROPOS_BENCH_LOG   prefix of the log files: <prefix>.<thread>.bin, and <prefix>.<thread>.err for error texts
--   ATROPOS_BENCH_TEST  read_write | read_only | write_only: which stock script is the load
--   ATROPOS_BENCH_MOVE_NS  a time on CLOCK_MONOTONIC, in ns: from then on all work is on the last table (optional)
--
-- Record (24 bytes, host byte order): int64 start_ns (CLOCK_MONOTONIC), int64 latency_ns, int32 status, int32 thread.
-- Status: see the constants below; the Rust reader mirrors them.
local ffi = require("ffi")
require("oltp_" .. (os.getenv("ATROPOS_BENCH_TEST") or "read_write"))

ffi.cdef[[
typedef struct { long tv_sec; long tv_nsec; } bench_timespec;
int clock_gettime(int clock, bench_timespec *ts);
typedef struct { int64_t start_ns; int64_t latency_ns; int32_t status; int32_t thread; } bench_record;
void *fopen(const char *path, const char *mode);
size_t fwrite(const void *ptr, size_t size, size_t count, void *file);
int fflush(void *file);
int fclose(void *file);
]]

local OK, CONFLICT, CANCELLED, CONNECTION, OTHER, TIMED_OUT = 0, 1, 2, 3, 4, 5
local CLOCK_MONOTONIC = 1
local FLUSH_NS = 500 * 1000 * 1000

local log_prefix = os.getenv("ATROPOS_BENCH_LOG")
local log, log_err, now_spec, record, last_flush

local function now_ns()
   ffi.C.clock_gettime(CLOCK_MONOTONIC, now_spec)
   return ffi.cast("int64_t", now_spec.tv_sec) * 1000000000LL + now_spec.tv_nsec
end

-- By SQLSTATE (PostgreSQL) and error number (MySQL). Deadlocks, serialization failures and unique violations belong
-- to the stock load (a delete/insert pair races with its twin); sysbench too restarts such transactions.
local statuses = {
   ["40P01"] = CONFLICT, ["40001"] = CONFLICT, ["23505"] = CONFLICT, ["57014"] = CANCELLED,
   ["57P01"] = CONNECTION, ["57P02"] = CONNECTION, ["57P03"] = CONNECTION, ["25P03"] = CONNECTION, [""] = CONNECTION,
   [1213] = CONFLICT, [1062] = CONFLICT, [1317] = CANCELLED, [1205] = TIMED_OUT, [3024] = TIMED_OUT,
   [1053] = CONNECTION, [2006] = CONNECTION, [2013] = CONNECTION, [4031] = CONNECTION,
}

local function code_of(err)
   if type(err) ~= "table" then return "" end -- an API error: the connection is gone
   if drv:name() == "mysql" then return err.sql_errno end
   return err.sql_state or ""
end

local function status_of(code)
   if type(code) == "string" and code:sub(1, 2) == "08" then return CONNECTION end
   return statuses[code] or OTHER
end

-- Every SQL error comes to event() below instead of ending the load.
function sysbench.hooks.sql_error_ignorable(err) return true end

local stock_thread_init, stock_thread_done, stock_event = thread_init, thread_done, event

local move_ns = tonumber(os.getenv("ATROPOS_BENCH_MOVE_NS") or "")
if move_ns then
   -- The stock script draws a table as uniform(1, tables).
   local draw = sysbench.rand.uniform
   function sysbench.rand.uniform(low, high)
      if low == 1 and high == sysbench.opt.tables and now_ns() >= move_ns then return high end
      return draw(low, high)
   end
end

function thread_init()
   now_spec, record = ffi.new("bench_timespec"), ffi.new("bench_record")
   if log_prefix then
      log = ffi.C.fopen(log_prefix .. "." .. sysbench.tid .. ".bin", "wb")
      assert(log ~= nil, "cannot create the log " .. log_prefix .. "." .. sysbench.tid .. ".bin")
      log_err = assert(io.open(log_prefix .. "." .. sysbench.tid .. ".err", "w"))
   end
   last_flush = 0
   stock_thread_init()
end

function thread_done()
   if log then ffi.C.fclose(log); log_err:close() end
   stock_thread_done()
end

-- The old connection's objects are detached from the collector, not closed: closing would talk to a dead connection.
local function reconnect()
   for t = 1, sysbench.opt.tables do
      for _, s in pairs(stmt[t]) do ffi.gc(s, nil) end
   end
   if stmt.begin then ffi.gc(stmt.begin, nil) end
   if stmt.commit then ffi.gc(stmt.commit, nil) end
   ffi.gc(con, nil)
   stock_thread_init()
end

local function one_line(s) return (tostring(s):gsub("[\r\n]+", " | ")) end

local function write(start, status)
   if not log then return end
   local finish = now_ns()
   record.start_ns, record.latency_ns, record.status, record.thread = start, finish - start, status, sysbench.tid
   ffi.C.fwrite(record, ffi.sizeof(record), 1, log)
   if finish - last_flush > FLUSH_NS then
      ffi.C.fflush(log)
      last_flush = finish
   end
end

function event()
   local start = now_ns()
   local ok, err = pcall(stock_event)
   if ok then return write(start, OK) end
   local code = code_of(err)
   local status = status_of(code)
   write(start, status)
   if log_err then
      local text = code .. "\t" .. one_line(type(err) == "table" and err.sql_errmsg or err)
      log_err:write(string.format("%s\t%d\t%s\n", tostring(start):gsub("LL$", ""), status, text))
      log_err:flush()
   end
   -- Outside a transaction ROLLBACK is only a warning; when it fails the connection is gone whatever the error said.
   if status == CONNECTION or not pcall(con.query, con, "ROLLBACK") then
      if not pcall(reconnect) then return true end -- the server is gone: end this thread; the reader sees the gap
   end
end
